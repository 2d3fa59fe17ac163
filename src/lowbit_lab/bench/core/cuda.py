"""A GPU and its clock: implementations in turn, timed by events, each behind a wait that hides its
start."""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lowbit.registry.extras import installed
from lowbit_lab.bench.core.case import LIMIT, Call, Implementation, Ready
from lowbit_lab.bench.core.clock import Limits, Samples, median_noise
from lowbit_lab.bench.core.context import Clock
from lowbit_lab.bench.core.peak import Ceiling

if TYPE_CHECKING:
    from lowbit_lab.bench.core.suite import Plan

# Python needs 100 µs and more to start a call; meanwhile the GPU is kept busy with nothing.
_HIDING_CYCLES, _CLOCK = 400_000, 2e9
_WARM_UPS = 3
Events = tuple[torch.cuda.Event, torch.cuda.Event]
Start = tuple[Callable[[], Events], int]
"""What starts calls, and how many lie between its two events."""
_Key = TypeVar("_Key", bound=Hashable)
# A CUDA graph starts in a few µs, and its kernels need none of Python.
_GRAPH_SECONDS, _MOST_CALLS = 200e-6, 64


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
        `limits.noise` or the time is up."""
        return in_rounds(self.starts(calls), limits, seed, on_round)

    def starts(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, Start]:
        """Of each; every call is made a few times before."""
        flush, named = _flush(self._device), calls.items()
        return {name: (partial(_timed, call, flush, _hiding(call)), 1) for name, (call,) in named}

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


def in_rounds(
    starts: Mapping[_Key, Start], limits: Limits, seed: int = 0,
    on_round: Callable[[float], None] | None = None,
) -> dict[_Key, Samples]:  # fmt: skip
    """Seconds of a call of each."""
    torch.cuda.synchronize()
    order, taken = random.Random(seed), {name: list[float]() for name in starts}
    begun = time.perf_counter()
    for count in range(1, limits.most_rounds + 1):
        turns = order.sample([*starts], len(starts))
        events = {name: starts[name][0]() for name in turns}
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            taken[name].append(start.elapsed_time(end) / 1e3 / starts[name][1])
        known = all(median_noise(np.array(one)) <= limits.noise for one in taken.values())
        used = (time.perf_counter() - begun) / limits.seconds
        if on_round is not None:
            on_round(min(used, 1.0))
        if count >= limits.least_rounds and (known or used > 1):
            break
    return {
        name: Samples(str(name), np.array(one), np.array(one), starts[name][1])
        for name, one in taken.items()
    }


class Graph:
    """Calls in a CUDA graph, one after another, until they last long beside its start."""

    def __init__(self, calls: Sequence[Call], seconds: float = _GRAPH_SECONDS) -> None:
        self.calls = calls
        calls[0]()
        self._graph = self._captured(len(calls))
        repeats = min(int(seconds / self.seconds()), _MOST_CALLS // len(calls))
        if repeats > 1:
            self._graph = self._captured(repeats * len(calls))

    def _captured(self, count: int) -> torch.cuda.CUDAGraph:
        self.count = count
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(count):
                self.calls[index % len(self.calls)]()
        graph.replay()
        return graph

    def start(self) -> Events:
        """Replay it once, between two events."""
        return _between(self._graph.replay, _HIDING_CYCLES // 10)

    def seconds(self) -> float:
        """Replay it once: seconds of all of its calls."""
        start, end = self.start()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class Graphs(Cuda):
    """Calls are timed in CUDA graphs, over one copy of the weights, or over several that are cold
    by the time they are read again."""

    def copies(self, sizes: Sequence[int]) -> list[int]:
        return [copies(size, self._device) for size in sizes]

    def starts(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, Start]:
        graphs = {name: Graph(several) for name, several in calls.items()}
        return {name: (graph.start, graph.count) for name, graph in graphs.items()}

    def ceiling(self, isa: str, threads: int, dtype: str) -> Ceiling:
        """The best that a few calls reach: products of each dtype, reads of a gigabyte."""
        with torch.inference_mode():
            ways = {name: _rate(_PRODUCT, calls) for name, calls in _products(self._device).items()}
            read = _rate(_READ, _reads(self._device))
        torch.cuda.empty_cache()
        peak = ways[dtype]
        rates = {"memory": read}
        return Ceiling("", 0, "a product of 8192 x 8192 x 8192", peak, peak, ways, rates, (), dtype)

    def tidy(self) -> None:
        """After a case: what it has captured is not replayed any more."""
        from lowbit.kernels.triton.fast.launch import forget_counters

        forget_counters()
        super().tidy()


_SIDE = 8192
_PRODUCT, _READ = 2 * _SIDE**3, 1 << 30


def _rate(work: int, calls: Sequence[Call]) -> float:
    """10^9 a second of so much work, by the fastest of some calls."""
    found = [0.0]
    for call in calls:
        graph = Graph([call] * 4, 0)
        found += [graph.count * work / graph.seconds() / 1e9 for _ in range(5)]
    return max(found)


def _products(device: torch.device) -> dict[str, list[Call]]:
    from lowbit.torch.functional import scaled_matmul

    made = torch.randn(2, _SIDE, _SIDE, device=device)
    x, y = made.bfloat16()
    float8 = [one.to(torch.float8_e4m3fn) for one in made]
    whole = [(32 * one).clamp(-127, 127).to(torch.int8) for one in made]
    one, rows = torch.ones((), device=device), torch.ones(_SIDE, device=device)

    def own(pair: Sequence[torch.Tensor]) -> Call:
        return lambda: scaled_matmul(pair[0], pair[1], rows, rows)

    def cublas() -> torch.Tensor:
        left, right = float8
        return torch.ops.aten._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16)

    return {
        "bfloat16": [lambda: x @ y.T],
        "int8": [lambda: torch.ops.aten._int_mm(whole[0], whole[1].T), own(whole)],
        "float8": [cublas, own(float8)],
    }


def _reads(device: torch.device) -> list[Call]:
    weight = torch.randn(_READ // 2 // _SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    x, half = weight[:1].clone(), torch.empty_like(weight[: len(weight) // 2])
    return [
        lambda: x @ weight.T,
        lambda: half.copy_(weight[: len(half)]),
        weight.view(torch.float32).sum,
    ]


def copies(nbytes: int, device: torch.device) -> int:
    """How many copies of a weight must take turns for none of it to be in the L2 cache."""
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-2 * cache // max(nbytes, 1)) + 1)


def _flush(device: torch.device) -> Callable[[], object]:
    """A read of memory of twice the L2 cache, before each timed call, so that none finds its
    operands there; a read, since what is written would still have to leave the cache."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(2 * size // 4, device=device).sum


def _hiding(call: Call) -> int:
    """Make a call a few times. How many cycles of a wait surely hide its start on this host."""
    begun = 0.0
    for _ in range(_WARM_UPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
    return max(_HIDING_CYCLES, int(3 * _CLOCK * (time.perf_counter() - begun)))


def _timed(call: Call, flush: Callable[[], object], cycles: int) -> Events:
    flush()
    return _between(call, cycles)


def _between(call: Call, cycles: int) -> Events:
    """Make a call between two events, behind a wait of so many cycles."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
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
