"""Plain functions of tensors: fixed points and implicit gradients, ridge regression, the simplex, masks."""
