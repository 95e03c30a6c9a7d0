"""One file per data set, or per way to bring one's own; each has `load`."""
