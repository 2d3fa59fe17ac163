"""A GPU that is not there, for programs that ask for one: while a program is watched on a machine
without a GPU, "cuda" is the CPU.

Tensors say that they lie on cuda:0, all of them; `.cuda()` and `.to("cuda")` are the tensor itself.
`torch.cuda` has one device that does nothing, with an H100's figures; so has Triton's driver.
`do_bench` calls what it is given once, and `perf_report` runs nothing.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")
_NAMED = re.compile(r"cuda(:\d+)?")
_ITSELF = (torch.Tensor.cuda, torch.Tensor.pin_memory)


def _mapped(value: Any) -> Any:
    """The CPU for a GPU, in an argument."""
    if isinstance(value, str) and _NAMED.fullmatch(value):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return value


class _OnCpu(TorchFunctionMode):
    """Within it, what torch is asked to do on a GPU it does on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ITSELF:
            return args[0]
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "is_cuda":
            return True
        if name == "device":
            return _CUDA
        named = {key: _mapped(value) for key, value in (kwargs or {}).items()}
        return func(*map(_mapped, args), **named)


class _Nothing:
    """A stream, an event or a context of a GPU that is not there: all its methods do nothing."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._begun = time.perf_counter()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def elapsed_time(self, end: _Nothing) -> float:
        """Milliseconds from one event's making to another's."""
        return 1e3 * (end._begun - self._begun)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_FIGURES = SimpleNamespace(
    name="NVIDIA H100 (interpreted)", major=9, minor=0, multi_processor_count=132,
    total_memory=80 << 30, warp_size=32, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=1 << 16, shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_OF_TORCH: Mapping[str, Any] = {
    "is_available": _always(True), "is_initialized": _always(True), "init": _always(None),
    "device_count": _always(1), "current_device": _always(0), "set_device": _always(None),
    "synchronize": _always(None), "empty_cache": _always(None),
    "get_device_name": _always(_FIGURES.name), "get_device_capability": _always((9, 0)),
    "get_device_properties": _always(_FIGURES), "is_bf16_supported": _always(True),
    "current_stream": _Nothing, "default_stream": _Nothing, "Stream": _Nothing, "Event": _Nothing,
    "stream": _Nothing, "device": _Nothing, "device_of": _Nothing,
    # Not torch.manual_seed, which calls them.
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": torch.default_generator.manual_seed,
    "mem_get_info": _always((80 << 30, 80 << 30)), "memory_allocated": _always(0),
    "max_memory_allocated": _always(0), "memory_reserved": _always(0),
    "reset_peak_memory_stats": _always(None),
}  # fmt: skip


class _Driver:
    """What Triton asks of its driver, outside of a launch."""

    utils = SimpleNamespace(
        get_device_properties=_always({
            "max_shared_mem": 227 << 10, "max_num_regs": 1 << 16, "multiprocessor_count": 132,
            "warpSize": 32, "sm_clock_rate": 1_980_000, "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        })
    )  # fmt: skip
    get_current_device, get_current_stream, set_current_device = map(_always, (0, 0, None))
    get_active_torch_device = _always(_CUDA)
    get_device_capability = _always((9, 0))
    get_device_interface = _always(torch.cuda)
    is_active = _always(True)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self) -> Callable[..., Any]:
        return _once


def _once(
    fn: Callable[[], Any], *_: Any, quantiles: Sequence[float] | None = None,
    return_mode: str = "mean", **__: Any,
) -> Any:  # fmt: skip
    """Instead of do_bench: the milliseconds of one call, interpreted."""
    begun = time.perf_counter()
    fn()
    took = 1e3 * (time.perf_counter() - begun)
    if quantiles is not None:
        return [took] * len(quantiles) if len(quantiles) > 1 else took
    return [took] if return_mode == "all" else took


@contextlib.contextmanager
def served_by_cpu(note: Callable[[str], None]) -> Iterator[None]:
    """Within it, programs find a GPU that is the CPU; `note` is told what they should know."""
    import triton

    def left_out(*_: Any, **__: Any) -> None:
        note("a report of triton.testing.perf_report was not run: it measures a GPU")

    with contextlib.ExitStack() as stack:
        for name, value in _OF_TORCH.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for holder, name, value in (
            (torch, "set_default_device", _always(None)),
            (triton.testing, "do_bench", _once),
            (triton.testing, "do_bench_cudagraph", _once),
            (triton.testing.Mark, "run", left_out),
            (type(triton.runtime.driver), "active", _Driver()),
        ):
            stack.enter_context(patch.object(holder, name, value))
        stack.enter_context(_OnCpu())
        yield
