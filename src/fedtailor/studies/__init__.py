"""Several runs that answer one question: compare, search, reproduce, explain."""
