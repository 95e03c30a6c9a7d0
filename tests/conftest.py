"""Settings of the whole test run: one thread, and property tests that draw the same examples every time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # tensors here are tiny; threads only cost, and tests run side by side
settings.register_profile("same-every-time", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("same-every-time")
