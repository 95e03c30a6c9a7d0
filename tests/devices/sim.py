"""The second torch device of the tests: after `load()` torch knows "sim:0" and "sim:1", wherever there is a compiler.

It is compiled once per machine, source and version of torch. In processes that a test starts, torch loads it by itself,
as it does any device's package (entry points "torch.backends"): see `for_processes`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("sim.cpp")
LOADED: dict[str, Any] = {}


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def load() -> None:
    """Make the device known to torch in this process."""
    if "library" in LOADED:
        return
    library = ctypes.CDLL(str(_compiled()))
    for name in ("reads", "writes", "peak", "now", "allocations", "limit"):
        getattr(library, f"sim_{name}").restype = ctypes.c_int64
    library.sim_set_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    LOADED["library"] = library
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=False)


def backend() -> None:
    """For processes that a test starts: as `load`, and the device is one that "auto" finds."""
    load()
    LOADED["is_visible"] = True


def reads() -> int:
    """Numbers and tensors read off the device so far: each makes the host wait for it."""
    return int(LOADED["library"].sim_reads())


def writes() -> int:
    """Copies onto the device so far."""
    return int(LOADED["library"].sim_writes())


def allocations(unit: int) -> int:
    """How often memory of a unit was asked for."""
    return int(LOADED["library"].sim_allocations(unit))


def in_use(unit: int = 0) -> int:
    """Bytes of a unit that are taken."""
    return int(LOADED["library"].sim_now(unit))


@contextmanager
def limited(size: int, unit: int = 0) -> Iterator[None]:
    """A unit with so many bytes beside those that are taken now."""
    before = LOADED["library"].sim_limit(unit)
    LOADED["library"].sim_set_limit(unit, in_use(unit) + size)
    try:
        yield
    finally:
        LOADED["library"].sim_set_limit(unit, before)


@contextmanager
def visible() -> Iterator[None]:
    """The device is one that "auto" finds; else it has to be named."""
    LOADED["is_visible"] = True
    try:
        yield
    finally:
        LOADED["is_visible"] = False


@contextmanager
def without_float64() -> Iterator[None]:
    """As Apple's devices are."""
    from fedtailor.core.trees import widest  # not before torch, which loads this file in some processes, is whole

    LOADED["library"].sim_set_double(0)
    widest.cache_clear()
    try:
        yield
    finally:
        LOADED["library"].sim_set_double(1)
        widest.cache_clear()


def for_processes(folder: Path) -> dict[str, str]:
    """Environment in which torch finds the device's package, which is written to a folder."""
    info = folder / "fedtailor_sim-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fedtailor-sim\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsim = tests.devices.sim:backend\n")
    root = str(SOURCE.parents[2])
    path = os.pathsep.join([str(folder), root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def _module() -> types.ModuleType:
    """What torch and we ask a device's module for; as torch.cuda has it."""
    library = LOADED["library"]
    module = types.ModuleType("torch.sim")

    def unit(device: Any = None) -> int:
        index = device if isinstance(device, int) else torch.device(device or "sim").index
        return torch.accelerator.current_device_index() if index is None else int(index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        total = min(library.sim_limit(unit(device)), 2**34)
        return total - library.sim_now(unit(device)), total

    functions = {
        "is_available": lambda: LOADED.get("is_visible", False),
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: torch.accelerator.current_device_index(),
        "set_device": lambda device: torch.accelerator.set_device_index(unit(device)),
        "synchronize": lambda device=None: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: int(library.sim_now(unit(device))),
        "max_memory_allocated": lambda device=None: int(library.sim_peak(unit(device))),
        "reset_peak_memory_stats": lambda device=None: library.sim_reset_peak(unit(device)),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _compiled() -> Path:
    """The library, compiled if nobody has; others wait for it meanwhile."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedtailor-tests"
    cache.mkdir(parents=True, exist_ok=True)
    library = cache / f"sim-{key}.so"
    with (cache / "sim.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler: the second device cannot be made")
    home = Path(torch.__file__).parent
    part = library.with_suffix(".part")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    inside = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    beside = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [
        found,
        "-std=c++20",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        abi,
        *inside,
        str(SOURCE),
        "-o",
        str(part),
        *beside,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the second device does not compile: {done.stderr[-2000:]}")
    part.rename(library)
