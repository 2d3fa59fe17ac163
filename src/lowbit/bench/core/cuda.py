"""A GPU and its clock: implementations in turn, timed by events, each behind a wait that hides its
start."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lowbit.bench.core.case import LIMIT, Call, Implementation, Ready
from lowbit.bench.core.clock import Limits, Samples, median_noise
from lowbit.bench.core.context import Clock
from lowbit.registry.extras import installed

if TYPE_CHECKING:
    from lowbit.bench.core.suite import Plan

# Python needs some 100 µs to start a kernel; meanwhile the GPU is kept busy with nothing.
_HIDING_CYCLES = 400_000
_WARM_UPS = 3


class Copy(Implementation):
    """A copy that moves as many bytes as the problem, half of them in each direction."""

    name = "copy"
    kind = LIMIT
    package = "torch", "torch"

    def prepare(self, problem: Any, threads: int) -> Ready:
        size = max(problem.bytes // 2, 1)
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return Ready(lambda: target.copy_(source))


def require(device: str) -> torch.device:
    """The device. RuntimeError or ValueError, in one line, if it cannot be used."""
    if device != "cuda" and not device.startswith("cuda:"):
        raise ValueError(f"device is {device!r}; these operators are timed on cuda")
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU that PyTorch can use; run this where there is one")
    return torch.device(device)


class Cuda(Clock):
    """Calls are timed by the GPU, with cold caches."""

    # Peers refuse in many ways, and a kernel may not compile.
    refusals = own_refusals = (Exception,)

    def __init__(self, device: str) -> None:
        self._device = require(device)
        self._before = _state(self._device)

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        """Make the device the current one."""
        with torch.cuda.device(self._device):
            yield

    def time(
        self, calls: Mapping[str, Sequence[Call]], limits: Limits, *, seed: int = 0,
        on_round: Callable[[float], None] | None = None, pools: Mapping[str, str] | None = None,
    ) -> dict[str, Samples]:  # fmt: skip
        """Seconds of each call, in rounds of random order, until all medians are known to
        `limits.noise` or the time is up. Every call is made a few times before."""
        flush = _flush(self._device)
        for (call,) in calls.values():
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.synchronize()
        order, taken = random.Random(seed), {name: list[float]() for name in calls}
        begun = time.perf_counter()
        for count in range(1, limits.most_rounds + 1):
            turns = order.sample([*calls], len(calls))
            events = {name: _timed(calls[name][0], flush) for name in turns}
            torch.cuda.synchronize()
            for name, (start, end) in events.items():
                taken[name].append(start.elapsed_time(end) / 1e3)
            known = all(median_noise(np.array(one)) <= limits.noise for one in taken.values())
            used = (time.perf_counter() - begun) / limits.seconds
            if on_round is not None:
                on_round(min(used, 1.0))
            if count >= limits.least_rounds and (known or used > 1):
                break
        return {n: Samples(n, np.array(one), np.array(one), 1) for n, one in taken.items()}

    def tidy(self) -> None:
        """After a case: give back memory, and what was compiled for its sizes."""
        torch.cuda.empty_cache()
        torch.compiler.reset()

    def context(self, plan: Plan) -> dict[str, Any]:
        """The GPU, its clocks and power before and after the run (where nvidia-ml-py is
        installed)."""
        properties = torch.cuda.get_device_properties(self._device)
        found = super().context(plan)
        found["versions"] |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        return found | {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "now": self._before,
            "then": _state(self._device),
        }


def _flush(device: torch.device) -> Callable[[], object]:
    """A read of memory of twice the L2 cache, before each timed call, so that none finds its
    operands there; a read, since what is written would still have to leave the cache."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(2 * size // 4, device=device).sum


def _timed(call: Call, flush: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    torch.cuda._sleep(_HIDING_CYCLES)
    start.record()
    call()
    end.record()
    return start, end


def _state(device: torch.device) -> dict[str, Any]:
    """Driver, clocks in MHz, power in W; empty without nvidia-ml-py."""
    if not installed("pynvml"):
        return {}
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "sm_clock": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
    except nvml.NVMLError as error:
        return {"unknown": str(error)}
    finally:
        nvml.nvmlShutdown()
