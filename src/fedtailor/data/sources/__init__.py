"""Data sources, one per file; each has `load(config, *, seed, root)`, which returns a `FederatedData`."""
