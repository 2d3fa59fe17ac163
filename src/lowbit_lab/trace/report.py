"""What a trace finds, as data: everything that the text shows stands in the JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lowbit_lab.bench.core.record import Spread
from lowbit_lab.trace.operators import Operator


@dataclass(frozen=True)
class Frame:
    """One function of the call chain. kind: "Python", "native", or "generated" for code that was
    made at run time. matters: whether the short chain shows it. named: not by its place alone."""

    function: str
    where: str
    kind: str
    matters: bool = True
    named: bool = True


@dataclass(frozen=True)
class Line:
    """An instruction of the hot loop: its roles, and the samples that were taken there."""

    address: int
    text: str
    roles: tuple[str, ...]
    samples: int


LOOP, STRAIGHT = "loop", "straight-line code"


@dataclass(frozen=True)
class Loop:
    """A loop, or straight-line code that runs once a call (`form`), of `samples` samples, a `share`
    of all. Loops inside of it are regions of their own.

    function: where it is, with `library`; kind: as of a frame. part: which of the four parts of a
    product it is. structure: instructions of each role, of one round. instruction_sets: those that
    its vector instructions belong to; vector_bits: their width. multiply_adds: of one round.
    accumulators: registers that products are added to; few of them make each product wait for the
    one before. loads, stores: vectors or scalars read and written in one round, broadcasts among
    the loads.
    """

    function: str
    library: str
    kind: str
    part: str
    samples: int
    share: float
    start: int
    instructions: int
    structure: Mapping[str, int]
    mix: Mapping[str, int]
    instruction_sets: tuple[str, ...]
    vector_bits: int
    products: tuple[str, ...]
    arithmetic: str
    multiply_adds: int
    accumulators: int
    loads: int
    stores: int
    listing: tuple[Line, ...] = ()
    form: str = LOOP

    @property
    def loads_per_product(self) -> float | None:
        """Loads for each instruction that multiplies and adds."""
        count = sum(self.mix.get(name, 0) for name in self.products)
        return self.loads / count if count else None

    @property
    def stores_per_product(self) -> float | None:
        count = sum(self.mix.get(name, 0) for name in self.products)
        return self.stores / count if count else None


@dataclass(frozen=True)
class Part:
    """One of the parts that a product's time is split into: its share of the samples, and the
    functions in which they were."""

    name: str
    share: float
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """What the loop's structure allows, measured by running its own instructions again.

    by: seconds of one round, for each kind of instruction alone (products, loads, stores) and for
    all together, every operand in the nearest cache. limited_by: the kind that takes longest, or
    what else keeps a round from being shorter. rate: multiply-adds a second, of all together.
    seconds: of a call at that rate, where its multiply-adds are known. loop_seconds: what a call
    takes in loops like this one, by the samples. reached: the share of one in the other.
    """

    by: Mapping[str, float]
    limited_by: str
    rate: float | None
    seconds: float | None
    loop_seconds: float
    reached: float | None


@dataclass(frozen=True)
class Verdict:
    """Whether the fast path was taken: None if that question has no answer here."""

    fast: bool | None
    text: str


@dataclass(frozen=True)
class Trace:
    """All of it. seconds: of a call, untraced; cpu_seconds: the least that the processor took for
    one, mean_cpu_seconds on average, and sampled_cpu_seconds while samples were taken.

    loops: those with the most samples, the hot loop first; () if there is none, and `why` says so.
    notes: what could not be found out, and why.
    """

    subject: str
    cpu: str
    threads: int
    versions: Mapping[str, str]
    seconds: Spread
    cpu_seconds: float
    mean_cpu_seconds: float
    sampled_cpu_seconds: float
    multiply_adds: int | None
    samples: int
    operators: tuple[Operator, ...]
    operators_by: str
    chain: tuple[Frame, ...]
    loops: tuple[Loop, ...]
    why: str
    parts: tuple[Part, ...]
    limit: Limit | None
    verdict: Verdict
    notes: tuple[str, ...]
    took_seconds: float

    def to_json(self) -> str:
        """Everything as JSON text; addresses are numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        for row, one in zip(plain["loops"], self.loops, strict=True):
            row["loads_per_product"] = one.loads_per_product
            row["stores_per_product"] = one.stores_per_product
        return json.dumps(plain, indent=2, allow_nan=False)
