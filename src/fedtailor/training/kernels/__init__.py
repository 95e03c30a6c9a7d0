"""Fast paths of local training on a CPU. Each gives what the general path gives, to rounding."""
