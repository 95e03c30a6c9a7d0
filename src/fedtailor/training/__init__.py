"""Local steps as one differentiable operator: optimizers, batches, augmentation; kernels holds the fast paths."""
