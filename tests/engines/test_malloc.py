"""Freed memory is kept for the next step: counted in page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes, resource
import torch
from fedtailor.engines import machine as kernel

def faults():
    # the C library first puts the scraps beside aligned tensors aside, seven of each size, and until then a tensor
    # finds another place; how many it has put aside already differs from process to process, so none are left
    for size in range(8, 200, 16):
        for _ in range(1000):
            malloc(size)
    for _ in range(20):
        torch.ones(2**21)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

library = ctypes.CDLL(None)
malloc = library.malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
# as the C library begins; later it depends on what else has been freed
library.mallopt(kernel.M_MMAP_THRESHOLD, 128 * 1024)
print(faults())
with kernel.freed_memory_kept() as is_kept:
    assert is_kept
    print(faults())
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
def test_a_step_finds_the_memory_of_the_one_before() -> None:
    told = subprocess.run([sys.executable, "-c", STEPS], check=True, capture_output=True, text=True).stdout
    before, inside, after = map(int, told.split())
    assert before >= 20 * 2048  # every page of every tensor
    assert inside < before / 10
    assert after >= 20 * 2048  # as it was
