"""How a kernel is started: on the GPU, or in an interpreter that somebody above has put in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, Generic, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from lowbit.registry import Registry
from lowbit.registry.locks import Lock

Grid = tuple[int, ...]
Runner = Callable[[Any, Grid, Mapping[str, Any]], None]

_runner: ContextVar[Runner | None] = ContextVar("runner", default=None)

# What the host's compiler does with a·b + c, said aloud: Triton's default changes in 3.10.
_ALWAYS = {"enable_fp_fusion": True}


@contextmanager
def running(runner: Runner) -> Iterator[None]:
    """Within it, kernels on CPU tensors are handed to `runner(kernel, grid, arguments)`."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def interpreted() -> bool:
    """Whether kernels on CPU tensors can be run here."""
    return _runner.get() is not None


def launch(kernel: Any, grid: Grid, arguments: Mapping[str, Any], **options: Any) -> None:
    """Start a function under triton.jit.

    arguments: every parameter by name, tensors as torch tensors, constexprs too. options: what
    the compiler is told (num_warps, num_stages, ...). An empty grid starts nothing. RuntimeError
    for tensors that are not on a GPU, outside of `running`.
    """
    if 0 in grid:
        return
    # A tuple begins with its tensor, a descriptor (triton.tools.tensor_descriptor) has a `base`.
    firsts = (one[0] if isinstance(one, tuple) else one for one in arguments.values())
    tensors = (getattr(one, "base", one) for one in firsts)
    device = next(one.device for one in tensors if isinstance(one, Tensor))
    if device.type == "cuda":
        other = device.index != torch.cuda.current_device()
        with torch.cuda.device(device) if other else nullcontext():
            kernel[grid](**arguments, **_ALWAYS, **options)
        return
    runner = _runner.get()
    if runner is None:
        raise RuntimeError(
            f"this kernel needs tensors on a GPU, got one on {device}; move them with .cuda(), or "
            "run it in the interpreter: with lowbit_lab.interpreter(): ..."
        )
    runner(kernel, grid, arguments)


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides which kernel serves a call and how it is cut: the compute capability
    as one number, 90 for 9.0, how many multiprocessors there are, and the name of its table."""

    capability: int
    multiprocessors: int
    name: str = ""

    @property
    def assembly(self) -> bool:
        """Whether PTX can be written into kernels: not where they are interpreted."""
        return self.capability >= 80

    def __str__(self) -> str:
        if self == INTERPRETER:
            return "the interpreter"
        return f"sm_{self.capability} with {self.multiprocessors} multiprocessors"


INTERPRETER = Gpu(0, 1)
"""A CPU, where programs run one by one."""


@cache
def _by_index(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(10 * found.major + found.minor, found.multi_processor_count, found.name)


def gpu_of(device: torch.device) -> Gpu:
    """What is known of a device."""
    if device.type != "cuda":
        return INTERPRETER
    return _by_index(torch.cuda.current_device() if device.index is None else device.index)


# Words in which the programs of a launch count who has finished: 0 before each launch, and set to 0
# again by the last program, so that nothing has to be launched for it.

_WORDS, _OF_A_STREAM = 1 << 20, 1 << 14
_LOCK = Lock()


class _Pool:
    """The words of one GPU. Launches that may run at the same time never share any: each stream has
    its own, and so has each launch within a CUDA graph, for good."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(_WORDS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # before another stream uses them
        self.free = 0
        self.streams: dict[int, Tensor] = {}

    def take(self, count: int) -> Tensor | None:
        """So many words that nobody has, if there are still some."""
        first, self.free = self.free, self.free + count + -count % 32  # of whole lines
        return self.words[first : first + count] if self.free <= _WORDS else None


_pools: dict[torch.device, _Pool] = {}


def forget_counters() -> None:
    """Take back the words of all CUDA graphs. None that was captured may be replayed after it."""
    with _LOCK:
        _pools.clear()


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` words of 0, int32, for one launch on the current stream."""
    found = None
    if device.type == "cuda":
        captured = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream
        with _LOCK:
            if device not in _pools and not captured:
                _pools[device] = _Pool(device)
            if (pool := _pools.get(device)) is not None and captured:
                found = pool.take(count)
            elif pool is not None and count <= _OF_A_STREAM:
                if stream not in pool.streams and (own := pool.take(_OF_A_STREAM)) is not None:
                    pool.streams[stream] = own
                found = pool.streams.get(stream)
    # Where there are none left, or a graph is the first to ask, they are zeroed before each launch.
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found


# Configurations: what their records have in common, and how one is chosen.

LEAST_DOT = 16
"""Of rows, columns and terms of a block, for the matrix units."""
_SHARED_BYTES = 227 << 10
"""Shared memory of a program on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""

C = TypeVar("C")
P = ParamSpec("P")

Table = Mapping[int, Mapping[Hashable, C]]
"""By compute capability, then by what the family tells cases apart by."""


@dataclass(frozen=True)
class Config:
    """Base of the records of what can be tuned.

    A class names its fields that must be powers of two, each with its least, and those that must
    only be `positive`.
    """

    _least: ClassVar[Mapping[str, int]] = {}
    _positive: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, positive: tuple[str, ...] = (), **powers: int) -> None:
        cls._least, cls._positive = powers or cls._least, positive or cls._positive

    def refusal(self, *facts: Any) -> str | None:
        """Why it does not fit a call, of which each kind has its own facts; None if it does."""
        for name in (*self._least, *self._positive):
            value, least = getattr(self, name), self._least.get(name, 1)
            if name in self._least and (value < 1 or value & (value - 1)):
                return f"{name} is {value}; it must be a power of two"
            if value < least:
                return f"{name} is {value}; it must be {least} or more"
        return self.misfit(*facts)

    def misfit(self, *args: Any, **kwargs: Any) -> str | None:
        """What else speaks against it, where all fields have values that are possible."""
        return None

    def require(self, *facts: Any) -> None:
        """ValueError if it refuses these facts of a call, with its reason."""
        if reason := self.refusal(*facts):
            raise ValueError(f"{self} does not fit: {reason}")

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told."""
        found = {name: getattr(self, name, None) for name in ("num_warps", "num_stages", "maxnreg")}
        return {name: value for name, value in found.items() if value is not None}


def warps_misfit(rows: int, num_warps: int, num_stages: int) -> str | None:
    """The complaint about rows that warps of a matrix instruction don't share, or no step ahead."""
    if rows % (16 * num_warps):
        return f"rows is {rows}; each of {num_warps} warps takes 16 at a time"
    return None if num_stages > 1 else f"num_stages is {num_stages}; loads need a step ahead"


@dataclass(frozen=True)
class TileConfig(Config, rows=64, columns=16, num_warps=4, splits=1):
    """Tiles of `rows` of a weight by `columns` rows of x, K cut in `splits`, `num_stages - 1` steps
    of 128 k ahead."""

    rows: int
    columns: int
    splits: int
    num_warps: int
    num_stages: int

    def misfit_holding(self, held: int) -> str | None:
        """The misfit of one whose program takes so many bytes of shared memory."""
        reason = warps_misfit(self.rows, self.num_warps, self.num_stages)
        return reason or too_much_shared(held)

    def fitting(self, *facts: Any) -> Self:
        """The same with as many stages as fit, if fewer do."""
        fewer = (replace(self, num_stages=n) for n in range(self.num_stages, 1, -1))
        return next((one for one in fewer if not one.misfit(*facts)), self)

    def tiles(self, M: int, N: int) -> int:
        """How many there are in all, of x [M, K] by a weight [N, K]."""
        return -(-N // self.rows) * -(-M // self.columns)


T = TypeVar("T", bound=TileConfig)
# What a step of 128 k costs, in rows times columns of a product: to load the weight and make it
# ready takes as long as so many columns more, and tiles of 64 rows take longer for what they do. A
# wave of programs begins and ends, and parts of K are written and added up. Fitted on an H200 to 78
# products of int4 and of int8, of which the choice loses 2 % to the best on average.
_WEIGHT, _NARROW, _START, _PART = 256, 1.25, 200_000, 40


def cheapest(several: Sequence[T], gpu: Gpu, M: int, N: int, K: int, even: bool = False) -> T:
    """The one that takes the least time by an estimate, with K whole or cut in two or four: waves
    of programs over the multiprocessors. even: whether parts of K must be equal steps of 128."""

    def time(config: T) -> float:
        programs = config.tiles(M, N) * config.splits
        deep = steps / config.splits * config.rows * (_NARROW if config.rows == 64 else 1)
        wave = deep * (config.columns + _WEIGHT) + _START
        parts = _PART * config.splits * config.rows * config.columns * (config.splits > 1)
        return -(-programs // gpu.multiprocessors) * wave + parts

    steps = -(-K // 128)
    cuts = [n for n in (1, 2, 4) if n == 1 or (steps >= 4 * n and not (even and steps % n))]
    return min((replace(one, splits=n) for one in several for n in cuts), key=time)


def parts_of(z: Tensor, tiles: int, area: int, splits: int) -> dict[str, Any]:
    """Memory for the sums, `area` of each tile, of each of the programs along K, and counters of
    those that have come to the end: arguments of `fragments.finish`."""
    if splits == 1:
        return {"part_ptr": None, "met_ptr": None, "SPLITS": 1}
    part = torch.empty(tiles, splits, area, dtype=torch.float32, device=z.device)
    return {"part_ptr": part, "met_ptr": counters(z.device, tiles), "SPLITS": splits}


@dataclass(frozen=True)
class Choice(Generic[C]):
    """Which kernel serves a call, how it is cut, and why; refused: others that come before it, and
    why they do not; source: where the configuration comes from, where that can differ."""

    kernel: str
    config: C
    why: str
    refused: tuple[tuple[str, str], ...] = ()
    source: str = ""

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.why}"]
        if self.config is not None:
            lines.append(f"  {self.config}{': ' * bool(self.source)}{self.source}")
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.refused)])


choices: Registry[Callable[..., Choice[Any]]] = Registry("operator", "lowbit.kernels.triton.fast")
"""By operator: the function of a Gpu, of the sizes by name, and of `itemsize`, the bytes of an
element, that chooses its kernel and configuration."""


def choosing(operator: str) -> Callable[[Callable[P, Choice[C]]], Callable[P, Choice[C]]]:
    """The decorator of a function that chooses for an operator: it is asked once for each case."""

    def register(choose: Callable[P, Choice[C]]) -> Callable[P, Choice[C]]:
        cached: Any = lru_cache(1024)(choose)
        _forgetting.append(cached.cache_clear)
        return choices.add(operator, cached)

    return register


_forgetting: list[Callable[[], None]] = []


def forget_choices() -> None:
    """Let every choice be made anew."""
    for forget in _forgetting:
        forget()


def from_table(
    kernel: str, table: Table[C], gpu: Gpu, key: Hashable, what: str, fallback: C
) -> Choice[C]:
    """The configuration of a table, else one that fits any GPU; what: the key in words."""
    found = table.get(gpu.capability, {}).get(key)
    if found is not None:
        return Choice(kernel, found, f"the table has it for {what} on sm_{gpu.capability}")
    known = " and ".join(f"sm_{one}" for one in table)
    missing = f"made for {known}; says nothing of {what} on {gpu}"
    return Choice(kernel, fallback, "fits any GPU", (("the table", missing),))


def refuse_itemsize(operator: str, itemsize: int) -> None:
    """ValueError unless elements have 16 bits."""
    if itemsize != 2:
        raise ValueError(f"{operator} takes bfloat16 or float16, got elements of {itemsize} bytes")


def too_much_shared(held: int) -> str | None:
    """The complaint about blocks that take so many bytes, if they are too many."""
    if held <= _SHARED_BYTES:
        return None
    return f"its blocks take {held} bytes of shared memory, more than {_SHARED_BYTES}"
