"""The same algorithms over a real network."""
