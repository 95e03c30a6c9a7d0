"""What the server, and those who see the result, do not learn about a single client."""
