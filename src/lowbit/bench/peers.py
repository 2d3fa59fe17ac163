"""Every implementation, ours and foreign, behind one protocol.

What times or checks one thus does the same to all. Each allocates its own result, as a user's
call does. A new one is a class with the `implementation` decorator.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit import ops
from lowbit.bench.problem import Problem
from lowbit.numerics import QTensor, int_format
from lowbit.spec import LINEAR_DYNAMIC, MATMUL, Case

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """An implementation with its weights packed: `call` is what is timed, `read` makes its
    result an array [M, N]."""

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray


class Implementation(Protocol):
    """Something that can multiply two matrices.

    name: unique, for the table. ours: whether it is lowbit's own. note: what it does otherwise
    than the specification says, "" if nothing. isolated: whether it is to be tried in a process
    of its own first, since it can crash.
    """

    name: str
    ours: bool
    note: str
    isolated: bool

    def available(self, case: Case) -> str | None:
        """None if it can run this case here, else the reason."""
        ...

    def library(self) -> tuple[str, str]:
        """The library that does the work, and its version. Only after `available`."""
        ...

    def isa(self, case: Case) -> str | None:
        """The instruction set that it uses, None if it does not tell."""
        ...

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        """Pack the weights; what this does is not timed."""
        ...


_REGISTRY: dict[str, Implementation] = {}


_Class = TypeVar("_Class", bound=Callable[[], Implementation])


def implementation(cls: _Class) -> _Class:
    """Register a class whose instances are `Implementation`s; it is made without arguments."""
    made = cls()
    if made.name in _REGISTRY:
        raise ValueError(f"two implementations are called {made.name!r}; rename one")
    _REGISTRY[made.name] = made
    return cls


def implementations() -> tuple[Implementation, ...]:
    """Every registered implementation, in the order of registration."""
    return tuple(_REGISTRY.values())


def find(name: str) -> Implementation:
    """The implementation of that name; ValueError lists the known ones."""
    if name not in _REGISTRY:
        raise ValueError(f"no implementation {name!r}; known are {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


@implementation
class Lowbit:
    """This library, through its public functions."""

    name = "lowbit"
    ours = True
    note = ""
    isolated = False

    def available(self, case: Case) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "lowbit", lowbit.__version__

    def isa(self, case: Case) -> str | None:
        return ops.active_kernel(case.spec.name)[1]

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        if problem.b_scale is None:
            packed = ops.pack(problem.b)
            return Prepared(partial(ops.matmul, problem.a, packed, threads=threads))
        zero = np.zeros(problem.b_scale.shape, np.int32)
        weight = QTensor(problem.b, problem.b_scale, zero, int_format(problem.b.dtype.name), axis=1)
        packed = ops.pack(weight)
        if problem.case.spec is LINEAR_DYNAMIC:
            return Prepared(partial(ops.linear_dynamic, problem.a, packed, threads=threads))
        return Prepared(
            partial(
                ops.matmul_scaled,
                problem.a,
                packed,
                a_scale=problem.a_scale,
                a_zero_point=problem.a_zero_point,
                threads=threads,
            )
        )


@implementation
class NumpyFloat:
    """NumPy's float32 product on the float version of the data."""

    name = "numpy fp32"
    ours = False
    note = "float32 data"
    isolated = False

    def available(self, case: Case) -> str | None:
        if importlib.util.find_spec("threadpoolctl") is None:
            return "its threads cannot be set; install threadpoolctl"
        return None

    def library(self) -> tuple[str, str]:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return str(blas["name"]), f"{blas['version']} in numpy {np.__version__}"

    def isa(self, case: Case) -> str | None:
        from threadpoolctl import threadpool_info

        names = [pool.get("architecture") for pool in threadpool_info()]
        return next((name for name in names if name), None)

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        return Prepared(partial(np.matmul, problem.a_float, problem.b_float))


class _Torch:
    """What the peers inside PyTorch share."""

    ours = False
    note = ""
    isolated = True
    component: tuple[str, str] | None = None
    """Name and pattern of its version in torch's build configuration."""
    engine: str = ""
    """The engine of torch's quantized operators that it needs, "" if none."""

    def available(self, case: Case) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed: pip install 'lowbit[torch]'"
        import torch

        engines = torch.backends.quantized.supported_engines
        if self.engine and self.engine not in engines:
            return f"this PyTorch has no engine {self.engine}; it has {', '.join(engines)}"
        return None

    def library(self) -> tuple[str, str]:
        import torch

        inside = f"torch {torch.__version__}"
        if self.component is None:
            return "torch", str(torch.__version__)
        name, pattern = self.component
        match = re.search(pattern, torch.__config__.show())
        return name, f"{match[1]} in {inside}" if match else f"in {inside}"

    def isa(self, case: Case) -> str | None:
        return None


_MKL = ("MKL", r"Math Kernel Library Version (\S+?)-")
_ONEDNN = ("oneDNN", r"MKL-DNN v(\S+)")
_FBGEMM = ("FBGEMM", r"FBGEMM v(\S+)")


@implementation
class TorchFloat(_Torch):
    """PyTorch's float32 product on the float version of the data: MKL on x86-64."""

    name = "torch fp32"
    note = "float32 data"
    isolated = False
    component = _MKL

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        import torch

        a, b = torch.from_numpy(problem.a_float), torch.from_numpy(problem.b_float)
        return Prepared(partial(torch.mm, a, b))


@implementation
class TorchIntMm(_Torch):
    """`torch._int_mm`: 8-bit integers to int32, weights not packed in advance."""

    name = "torch _int_mm"
    note = "weights not packed"
    component = _ONEDNN

    def available(self, case: Case) -> str | None:
        if case.spec is not MATMUL or case.dtypes.split(":")[1] != "s8":
            return f"multiplies u8 or s8 by s8 into s32 only, not {case.dtypes}"
        return super().available(case)

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        import torch

        a, b = torch.from_numpy(problem.a), torch.from_numpy(problem.b)
        return Prepared(partial(torch.ops.aten._int_mm.default, a, b))


@implementation
class OnednnLinear(_Torch):
    """oneDNN through torch's qlinear: 8-bit integers to float32, weights packed."""

    name = "oneDNN qlinear"
    component = _ONEDNN
    engine = "onednn"

    def available(self, case: Case) -> str | None:
        left, right, _ = case.dtypes.split(":")
        if left == "f32" or right != "s8":
            return f"multiplies u8 or s8 by s8 only, not {case.dtypes}"
        return super().available(case)

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        import torch

        m, n, k = (problem.case.sizes[dim] for dim in "MNK")
        weight = torch.from_numpy(np.ascontiguousarray(problem.b.T))
        call = partial(
            torch.ops.onednn.qlinear_pointwise.default,
            torch.from_numpy(problem.a),
            problem.a_scale or 1.0,
            problem.a_zero_point or 0,
            torch.ops.onednn.qlinear_prepack(weight, [m, k]),
            torch.from_numpy(_scales(problem)),
            torch.zeros(n, dtype=torch.int32),
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return Prepared(call)


@implementation
class FbgemmLinear(_Torch):
    """FBGEMM through torch's quantized linear, which makes 8 bits of the result again."""

    name = "FBGEMM qlinear"
    note = "u8 result"
    component = _FBGEMM
    engine = "fbgemm"

    def available(self, case: Case) -> str | None:
        left, right, _ = case.dtypes.split(":")
        if (left, right) != ("u8", "s8"):
            return f"multiplies u8 by s8 only, not {case.dtypes}"
        return super().available(case)

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        import torch

        ideal = problem.reference.ideal
        low, high = min(float(ideal.min()), 0.0), max(float(ideal.max()), 0.0)
        scale = (high - low) / 255 or 1.0
        with _quantized_tensors("fbgemm"):
            x = torch.quantize_per_tensor(
                torch.from_numpy(problem.a_float),
                problem.a_scale or 1.0,
                problem.a_zero_point or 0,
                torch.quint8,
            )
        weight = _packed_linear(problem, "fbgemm")
        linear = torch.ops.quantized.linear.default
        call = partial(linear, x, weight, scale, round(-low / scale))
        return Prepared(call, lambda result: result.dequantize().numpy())


class _TorchDynamic(_Torch):
    """torch's dynamic linear: one scale for the whole activation, found in each call."""

    note = "one scale for all rows"

    def available(self, case: Case) -> str | None:
        if case.spec is not LINEAR_DYNAMIC:
            return f"multiplies f32 by s8 only, not {case.dtypes}"
        return super().available(case)

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        import torch

        weight = _packed_linear(problem, self.engine)
        x = torch.from_numpy(problem.a)
        return Prepared(partial(torch.ops.quantized.linear_dynamic.default, x, weight, False))


@implementation
class OnednnDynamic(_TorchDynamic):
    """torch's dynamic linear on oneDNN."""

    name = "oneDNN dynamic"
    component = _ONEDNN
    engine = "onednn"


@implementation
class FbgemmDynamic(_TorchDynamic):
    """torch's dynamic linear on FBGEMM."""

    name = "FBGEMM dynamic"
    component = _FBGEMM
    engine = "fbgemm"


def _scales(problem: Problem) -> NDArray[np.float32]:
    """The weight's scale per output channel: 1 where the operation has none."""
    if problem.b_scale is None:
        return np.ones(problem.b.shape[1], np.float32)
    return problem.b_scale


@contextmanager
def _quantized_tensors(engine: str) -> Iterator[None]:
    """torch's quantized operators on `engine`, without the notice that their tensors will go."""
    import torch

    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            yield
    finally:
        torch.backends.quantized.engine = before


def _packed_linear(problem: Problem, engine: str) -> torch.ScriptObject:
    """The weight as torch's quantized operators take it, packed for `engine`.

    Rounding b_float / scale gives b again, exactly: float32 keeps far more than its 8 bits.
    """
    import torch

    with _quantized_tensors(engine):
        weight = torch.quantize_per_channel(
            torch.from_numpy(np.ascontiguousarray(problem.b_float.T)),
            torch.from_numpy(_scales(problem)),
            torch.zeros(problem.b.shape[1], dtype=torch.int64),
            0,
            torch.qint8,
        )
        return torch.ops.quantized.linear_prepack(weight, None)
