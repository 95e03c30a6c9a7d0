"""Several runs that answer one question: compare, search, reproduce, fit, explain."""
