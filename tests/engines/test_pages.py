"""Freed memory is kept for the next step: counted in page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from fedtailor.engines import pages
if "keep" in sys.argv:
    assert pages.keep()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    held = [torch.ones(2**21) for _ in range(5)]
for _ in range(3):
    step()
before = faults()
for _ in range(20):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
def test_a_step_finds_the_memory_of_the_one_before() -> None:
    found = {
        way: int(subprocess.run([sys.executable, "-c", STEPS, way], check=True, capture_output=True, text=True).stdout)
        for way in ("keep", "as it is")
    }
    assert found["as it is"] > 10_000
    assert found["keep"] < found["as it is"] / 10
