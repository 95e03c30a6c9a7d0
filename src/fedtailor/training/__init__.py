"""Local steps as one differentiable operator: optimizers, batches; kernels holds the fast paths."""
