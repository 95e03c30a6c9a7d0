"""What a federation is: trees, streams, tasks, models, algorithms, the client context, the federation and its tape."""
