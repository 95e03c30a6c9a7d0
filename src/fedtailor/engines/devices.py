"""The device that clients compute on: found by name or by itself, and what is known of its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fedtailor.core.data import SPLITS, FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import leaves
from fedtailor.errors import ClientError, ConfigError, RunError

CPU = torch.device("cpu")
ADVICE = "set a smaller federation.chunk or local.batch_size, or local.precision = bfloat16"


def find(wanted: str, *, rank: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[torch.device, str]:
    """The device of a configuration, and why it is that one; a rank on a machine takes the device of its number."""
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return CPU, f"torch {torch.__version__} finds no accelerator"
        device = with_index(accelerator, rank)  # first: no rank may touch the device of another
        if not has_type(device, dtype):
            return CPU, f"{accelerator.type} has no {_name(dtype)}"
        return device, f"torch {torch.__version__} finds {accelerator.type}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(
            f'federation.device = "{wanted}": torch knows no such device; use auto, cpu, cuda, cuda:0, mps or xpu'
        ) from None
    if device.type == "cpu":
        return CPU, "chosen"
    if why := _why_missing(device):
        raise ConfigError(f'federation.device = "{wanted}": {why}; use "cpu", or "auto", which takes what there is')
    device = with_index(device, rank)
    if not has_type(device, dtype):
        raise ConfigError(f'federation.device = "{wanted}": has no {_name(dtype)}; set model.dtype = "float32"')
    return device, "chosen"


def place(experiment: Experiment, device: torch.device) -> Experiment:
    """The experiment on a device; data that would take more than half of what is free there stays on the host."""
    if has_room(device, _nbytes(experiment.data)):
        return experiment.on(device)
    return replace(experiment, model=experiment.model.to(device))


def _nbytes(data: FederatedData) -> int:
    return sum(v.nbytes for split in SPLITS for v in leaves(getattr(data, split).tensors))


def has_type(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        torch.empty((), dtype=dtype, device=device)
    except TypeError:
        return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def with_index(device: torch.device, rank: int | None = None) -> torch.device:
    """The device with an index: its own, or that of the rank modulo the number of devices."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, 0 if rank is None else rank % count(device))


def count(device: torch.device) -> int:
    """How many devices of this type there are."""
    return int(torch.get_device_module(device).device_count())


def local_rank() -> int | None:
    """The number of this process on its machine, under torchrun."""
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None


def _why_missing(device: torch.device) -> str:
    """Why a device cannot be used; empty if it can."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return f"this build of torch ({torch.__version__}) has no {device.type}"
    built = getattr(getattr(torch.backends, device.type, None), "is_built", None)
    if built is not None and not built():
        return f"this build of torch ({torch.__version__}) has no {device.type}"
    number = int(module.device_count())
    if not number:
        return f"torch {torch.__version__} finds no {device.type} device on this machine"
    return f"there are only {number}, numbered from 0" if (device.index or 0) >= number else ""


def must_spawn(device: torch.device) -> bool:
    """Whether processes for a device cannot be forked: what drives most of them does not live through that.

    Where there are devices, autograd has threads for them once it has computed any gradient; then none can be computed
    in a process that is forked, not even on the CPU.
    """
    found = torch.accelerator.current_accelerator()
    # a build for CUDA is one whether or not there is a driver
    has_devices = found is not None and (found.type != "cuda" or torch.cuda.is_available())
    return device.type != "cpu" or (has_devices and not _has_gradients_when_forked())


def _has_gradients_when_forked() -> bool:
    process = os.fork()
    if process == 0:
        try:
            torch.ones((), device="cpu").requires_grad_().square().backward()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


def use(device: torch.device) -> None:
    """Make it the current device of this thread, which a device without an index means."""
    if device.type != "cpu" and device.index is not None and hasattr(torch.get_device_module(device), "set_device"):
        torch.get_device_module(device).set_device(device.index)


def free_memory(device: torch.device) -> int | None:
    """Free bytes; None if the device does not report them."""
    reading = _ask(device, "mem_get_info")
    return None if reading is None else int(reading[0])


def has_room(device: torch.device, size: int) -> bool:
    """Whether so many bytes are at most half of the free memory; the CPU has a budget of its own."""
    free = None if device.type == "cpu" else free_memory(device)
    return free is None or size <= free // 2


def begin_peak(device: torch.device) -> None:
    _ask(device, "reset_peak_memory_stats")


def peak_memory(device: torch.device) -> int | None:
    """Peak of bytes in use since `begin_peak`; None if the device does not report it."""
    reading = _ask(device, "max_memory_allocated")
    return None if reading is None else int(reading)


def empty_cache(device: torch.device) -> None:
    """Give free blocks of torch's cache back to the device."""
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "empty_cache"):
        module.empty_cache()


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, means out of memory."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error).lower():
            return True
        if "can't allocate memory" in str(error):  # of the CPU
            return True
        error = error.__cause__
    return False


@contextmanager
def memory_errors_at(device: torch.device, where: str) -> Iterator[None]:
    """An out-of-memory error inside becomes a `RunError` with the place and advice."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ClientError) or not is_full(error):
            raise
        what = f"{where}: {device} is out of memory; {ADVICE}"
        raise RunError(f"{what} ({str(error).splitlines()[0]})") from None


def _ask(device: torch.device, function: str) -> Any:
    if device.type == "cpu" or not hasattr(module := torch.get_device_module(device), function):
        return None
    return getattr(module, function)(device)
