"""What stands on the ladder of uint4 products: its rungs, float32 BLAS, lowbit, and its peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit import dispatch, ops
from lowbit import isa as instruction_sets
from lowbit.bench import probe
from lowbit.bench.implementation import Prepared, find
from lowbit.bench.peers.numpy_float import NumpyFloat
from lowbit.bench.problem import Problem, Reference, gemm_case
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.integer.micro_kernel import Demand
from lowbit.numerics.nibbles import pack_nibbles
from lowbit.registry.extras import absent
from lowbit.spec import Case
from lowbit.spec.operations.products import integer_product

if TYPE_CHECKING:
    from lowbit.kernels.numba.registry import Rung

Bytes = NDArray[np.uint8]

LARGEST = 15
LONGEST_FLOAT_SUM = 2**24 // LARGEST**2
"""Products of uint4 values that float32 sums exactly, in any order: its 24 bits hold every whole
number up to 2**24."""

_BYTE_DTYPES = ("u8:s8:s32", "s8:s8:s32")


@dataclass(frozen=True, eq=False)
class Task:
    """The product of queries and vectors: uint8 a [M, K] and b [N, K], of values 0 to 15."""

    a: NDArray[np.uint8]
    b: NDArray[np.uint8]
    seed: int = 0

    @classmethod
    def make(cls, m: int, n: int, k: int, seed: int = 0) -> Task:
        """Values drawn uniformly over the full range; the same seed gives the same."""
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(0, LARGEST, (size, k), np.uint8, endpoint=True) for size in (m, n))
        return cls(a, b, seed)

    @property
    def shape(self) -> str:
        """As text, `MxK:KxN`."""
        (m, k), n = self.a.shape, len(self.b)
        return f"{m}x{k}:{k}x{n}"

    @property
    def sizes(self) -> dict[str, int]:
        """By the names M, N and K."""
        return {"M": len(self.a), "N": len(self.b), "K": self.a.shape[1]}

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        m, n, k = self.sizes.values()
        return 2 * m * n * k

    @property
    def bytes_moved(self) -> int:
        """The least: both operands packed and read once, 32-bit sums written once."""
        m, n, k = self.sizes.values()
        return (m + n) * -(-k // 2) + 4 * m * n

    @cached_property
    def expected(self) -> NDArray[np.int64]:
        """The exact sums, int64 [M, N]."""
        return integer_product(self.a, self.b.T)

    def error(self, result: NDArray[Any]) -> float:
        """The largest difference from the exact sums, as a share of the largest of these.

        ValueError if the result has another shape.
        """
        exact = self.expected
        if result.shape != exact.shape:
            raise ValueError(f"the result has the shape {result.shape}; expected {exact.shape}")
        difference = np.abs(result.astype(np.float64) - exact).max()
        return float(difference / max(1, int(exact.max())))


class Entry(Protocol):
    """Something that multiplies uint4 values.

    name: unique. kind: "rung", "peer" or "ours". idea: a line for the page. threaded: whether it
    can use more than one thread.
    """

    name: str
    kind: str
    idea: str
    threaded: bool

    def available(self, task: Task) -> str | None:
        """None if it can multiply this here, else the reason. Asked before all else."""
        ...

    def library(self) -> tuple[str, str]:
        """The library that does the work, and its version."""
        ...

    def isa(self, task: Task) -> str | None:
        """The instruction set or kernel that it uses, None if it does not tell."""
        ...

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Arrange the operands as it wants them, which is not timed."""
        ...


class NumbaRung:
    """A rung of lowbit.kernels.numba."""

    kind = "rung"
    threaded = False

    def __init__(self, rung: Rung) -> None:
        self.rung = rung
        self.name = rung.name
        self.idea = rung.idea

    def available(self, task: Task) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "Numba", metadata.version("numba")

    def isa(self, task: Task) -> str | None:
        return None

    def prepare(self, task: Task, threads: int) -> Prepared:
        return Prepared(self.rung.prepare(task.a, task.b))


class Einsum:
    """NumPy's own loops over integers, which do not go through BLAS."""

    name = "numpy einsum"
    kind = "rung"
    idea = "NumPy's loops over int32, no BLAS"
    threaded = False

    def available(self, task: Task) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "NumPy", np.__version__

    def isa(self, task: Task) -> str | None:
        return None

    def prepare(self, task: Task, threads: int) -> Prepared:
        # The faster of the layouts and integer types that were tried.
        a, b = task.a.astype(np.int32), np.ascontiguousarray(task.b.T.astype(np.int32))
        return Prepared(partial(np.einsum, "mk,kn->mn", a, b))


class Blas:
    """NumPy's float32 product: exact as long as its sums are whole numbers up to 2**24."""

    name = "numpy fp32"
    kind = "peer"
    idea = "BLAS on float32, exact for small values"
    threaded = True

    def __init__(self) -> None:
        self._blas = NumpyFloat()

    def available(self, task: Task) -> str | None:
        k = task.sizes["K"]
        if k > LONGEST_FLOAT_SUM:
            return f"K is {k}; float32 sums only {LONGEST_FLOAT_SUM} products of uint4 exactly"
        return self._blas.available(byte_case(task.shape))

    def library(self) -> tuple[str, str]:
        return self._blas.library()

    def isa(self, task: Task) -> str | None:
        return self._blas.isa(byte_case(task.shape))

    def prepare(self, task: Task, threads: int) -> Prepared:
        a, b = task.a.astype(np.float32), np.ascontiguousarray(task.b.T.astype(np.float32))
        return Prepared(partial(np.matmul, a, b))


def byte_case(shape: str) -> Case:
    """A shape `MxK:KxN` as a product of signed bytes, for what asks for such a case.

    ValueError as `gemm_case`: for a shape that is not understood, or too large for the sums or
    for this machine's memory.
    """
    return gemm_case(shape, _BYTE_DTYPES[-1])


class Lowbit:
    """This library: vectors packed two to a byte, queries as bytes."""

    name = "lowbit"
    kind = "ours"
    idea = "uint4 panels, unpacked on the way into an int8 product"
    threaded = True

    def available(self, task: Task) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "lowbit", lowbit.__version__

    def isa(self, task: Task) -> str | None:
        m, n, k = task.sizes.values()
        return dispatch.consider(instruction_sets.active(), Demand(m, n, k))[-1].isa.name

    def prepare(self, task: Task, threads: int) -> Prepared:
        packed = ops.pack(task.b.T, dtype="uint4")
        limit = None if max_threads() == threads else threads
        return Prepared(partial(ops.matmul, task.a, packed, threads=limit))


class BytePeer:
    """A peer of `lowbit bench gemm` that multiplies bytes, given 4-bit values in them.

    It gets unsigned bytes on the left if it takes them, else signed ones: all values fit both.
    """

    kind = "peer"
    threaded = True

    def __init__(self, name: str, idea: str) -> None:
        self.name = name
        self.idea = idea
        self._dtypes = ""
        self._kernel: str | None = None

    def available(self, task: Task) -> str | None:
        reasons: list[str] = []
        for dtypes in _BYTE_DTYPES:
            reason = self._try(dtypes, task)
            if reason is None:
                self._dtypes = dtypes
                return None
            reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons))

    def _try(self, dtypes: str, task: Task) -> str | None:
        """The reason against these dtypes, None if they work."""
        peer = find(self.name)
        try:
            case = gemm_case(task.shape, dtypes)
        except ValueError as error:
            return str(error)
        reason = peer.available(case)
        if reason is not None or not peer.isolated:
            return reason
        trial = probe.attempt(peer, [case], task.seed)
        self._kernel = trial.kernels.get(task.shape)
        return trial.reason

    def library(self) -> tuple[str, str]:
        return find(self.name).library()

    def isa(self, task: Task) -> str | None:
        return self._kernel

    def prepare(self, task: Task, threads: int) -> Prepared:
        return find(self.name).prepare(_byte_problem(task, self._dtypes), threads)


def _byte_problem(task: Task, dtypes: str) -> Problem:
    """The task as a problem of bytes, which hold its values whatever their sign."""
    left = np.int8 if dtypes.startswith("s8") else np.uint8
    a, b = task.a.view(left), np.ascontiguousarray(task.b.T).view(np.int8)
    case = gemm_case(task.shape, dtypes)
    reference = Reference(case, {"a": a, "b": b})
    floats = a.astype(np.float32), b.astype(np.float32)
    return Problem(case, a, b, *floats, None, None, None, reference)


class NumKong:
    """`numkong.dots_packed`, on uint4 two to a byte on both sides, or on bytes.

    Nibbles may be in either order, as long as both sides agree: they are packed as lowbit's.
    """

    kind = "peer"
    threaded = True

    def __init__(self, dtype: str, idea: str, arrange: Callable[[Bytes], Bytes]) -> None:
        self.name = f"NumKong {dtype}"
        self.idea = idea
        self._dtype = dtype
        self._arrange = arrange

    def available(self, task: Task) -> str | None:
        return absent("numkong")

    def library(self) -> tuple[str, str]:
        return "NumKong", metadata.version("numkong")

    def isa(self, task: Task) -> str | None:
        return None

    def prepare(self, task: Task, threads: int) -> Prepared:
        numkong: Any = importlib.import_module("numkong")
        packed = numkong.dots_pack(self._arrange(task.b), dtype=self._dtype)
        # Asked for one thread it would still enter a parallel region.
        options = {"threads": threads} if threads > 1 else {}
        return Prepared(partial(numkong.dots_packed, self._arrange(task.a), packed, **options))


def numba_rungs() -> tuple[Entry, ...]:
    """The rungs to read, from the lowest. ImportError if Numba or jaxtyping cannot be imported."""
    from lowbit.kernels.numba.registry import rungs

    return tuple(NumbaRung(rung) for rung in rungs())


def libraries() -> tuple[Entry, ...]:
    """What stands above those rungs, lowbit last."""
    return (
        Einsum(),
        Blas(),
        BytePeer("torch _int_mm", "bytes to 32-bit sums, vectors not packed"),
        BytePeer("oneDNN qlinear", "bytes to float32, vectors packed"),
        NumKong("uint4", "two values to a byte on both sides", pack_nibbles),
        NumKong("uint8", "bytes on both sides", np.ascontiguousarray),
        Lowbit(),
    )
