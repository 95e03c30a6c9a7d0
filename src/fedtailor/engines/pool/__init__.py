"""Worker processes, one per core; what they share lies in shared memory."""
