"""A suite: cases, their data, who does them, and how the record is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lowbit.registry import Registry
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import LIMIT, OURS, PEER, Case, Implementation, implementations_of
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cpu import Cpu

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit_lab.bench.core.context import Clock
    from lowbit_lab.bench.core.record import Record, Row


_Implementation = TypeVar("_Implementation", bound=Implementation)


@dataclass(frozen=True)
class Plan:
    """How to run a suite.

    peers: whether to run other libraries. cold: whether to time with weights from memory too,
    where that can make a difference. ValueError if there is no number of threads, or one is below
    1.
    """

    threads: Sequence[int] = (1,)
    peers: bool = True
    cold: bool = False
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.threads:
            raise ValueError("threads is empty; give at least one number")
        for threads in self.threads:
            if threads < 1:
                raise ValueError(f"threads is {threads}; it must be at least 1")


def option(default: Any, text: str, *, shown: str | None = None, argument: bool = False) -> Any:
    """A field of a suite that is an option of its command, or its `argument`. text: the help.
    shown: what the help says that the default is."""
    metadata = {"help": text, "show_default": shown, "argument": argument}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Suite:
    """A class below it has a name, says in its docstring what it times, and overrides what follows.
    Its fields, made by `option`, are the options of the command `lowbit bench NAME`.

    example: arguments of that command. distribution: of the data, for the record. patient: whether
    long products raise the time limit, so that all have their turns. pairs: whether each takes
    turns with lowbit alone, so that a slow one does not use up the time of the others. colds:
    whether there are weights that can be cold. ceiling: the dtype whose peak is measured, "" for
    none. least_cold_bytes: of weights that are gone round, where that is more than the last cache.
    threaded: whether a number of threads can be asked for. by_time: whether the fastest of a table
    come first.
    """

    name: ClassVar[str] = ""
    example: ClassVar[str] = ""
    distribution: ClassVar[str] = ""
    patient: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    colds: ClassVar[bool] = False
    ceiling: ClassVar[str] = "int8"
    least_cold_bytes: ClassVar[int] = 0
    threaded: ClassVar[bool] = True
    by_time: ClassVar[bool] = True

    def resolved(self) -> Suite:
        """The suite that these options ask for: this one, or another for another device."""
        return self

    @property
    def limits(self) -> Limits:
        """When to stop, if nobody says."""
        return Limits()

    @property
    def cold_by_default(self) -> bool:
        """Whether to time with weights from memory, if nobody says."""
        return self.colds

    def clock(self) -> Clock:
        """What times the calls. ValueError or RuntimeError if it cannot here."""
        return Cpu()

    def settings(self) -> Mapping[str, Any]:
        """What of the options the record is to hold."""
        return {}

    def cases(self, seed: int = 0) -> Sequence[Case]:
        """At least one. The seed is for cases that are drawn."""
        raise NotImplementedError

    def tried(self, case: Any) -> Case:
        """The case on which what could crash is tried, perhaps smaller."""
        return case

    def make(self, case: Any, seed: int) -> Any:
        """Draw the data, a `Problem`; the same seed gives the same."""
        raise NotImplementedError

    def implementations(self) -> Sequence[Implementation]:
        """All that can take part."""
        return implementations_of(self.name)

    def taking_part(self, problem: Any, chosen: Sequence[Implementation]) -> list[Implementation]:
        """Those of the chosen that do a problem."""
        return list(chosen)

    def references(self, several: Sequence[Implementation]) -> list[str]:
        """The names of what the others are compared with: lowbit's own."""
        return [one.name for one in several if one.kind == OURS]

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        """Many rows in a few figures."""
        return ()

    def title(self, record: Record) -> str:
        """What the tables of a record have in common."""
        return ""

    def columns(self, rows: Sequence[Row]) -> Sequence[table.Column]:
        """Of the tables, one for each case, number of threads and state of the weights."""
        common = (table.IMPLEMENTATION, table.TIME, table.SPREAD, table.GOPS, table.ERROR)
        return (*common, *table.ratio_columns(rows))

    def render(self, record: Record) -> RenderableType:
        """The record as text."""
        title = self.title(record)
        shown = table.tables(record.rows, self.columns(record.rows), by_time=self.by_time)
        return table.page(record, *([title, ""] if title else [""]), *shown, *self.ending(record))

    def ending(self, record: Record) -> Iterable[RenderableType]:
        """What stands below the tables."""
        return ()


def chosen(suite: Suite, plan: Plan) -> list[Implementation]:
    """Who of a suite takes part in a plan."""
    return [o for o in suite.implementations() if plan.peers or o.kind != PEER or o.always]


def fields(suite: type[Suite]) -> list[dataclasses.Field[Any]]:
    """The options of a suite."""
    return [one for one in dataclasses.fields(suite) if one.metadata]


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of an option, as in 1,16, each once. ValueError: they are none, or below 1."""
    try:
        several = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{name} {text!r} is not understood; write 16, or 1,16") from None
    if min(several) < 1:
        raise ValueError(f"a {name} is {min(several)}; it must be at least 1")
    return several


def named(what: str, text: str, suite: str, kind: type[_Implementation]) -> list[_Implementation]:
    """The implementations of a suite, of one kind, that an option asks for by parts of their names,
    as in lowbit,openvino; all if it is empty. ValueError if a part is in no name."""
    known = [one for one in implementations_of(suite) if isinstance(one, kind)]
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    for part in parts:
        if not any(part in one.name.lower() for one in known):
            names = ", ".join(one.name for one in known)
            raise ValueError(f"no {what} is called {part!r}; known are {names}")
    return [one for one in known if not parts or any(x in one.name.lower() for x in parts)]


def best_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By table: the fastest of lowbit's and of the others', and how many times as fast."""

    def median(row: Row) -> float:
        return row.seconds.median

    figures = list[dict[str, Any]]()
    for case, threads in dict.fromkeys((row.case, row.threads) for row in rows):
        here = [r for r in rows if (r.case, r.threads) == (case, threads) and r.kind != LIMIT]
        ours = min((row for row in here if row.ours), key=median, default=None)
        best = min((row for row in here if not row.ours), key=median, default=None)
        if ours is not None and best is not None:
            names = {"lowbit": ours.implementation, "best_peer": best.implementation}
            ratio = median(best) / median(ours)
            figures.append({"case": case, "threads": threads, **names, "ratio": ratio})
    return figures


suites: Registry[type[Suite]] = Registry("suite", "lowbit_lab.bench.suites")

_Suite = TypeVar("_Suite", bound=Suite)


def suite(cls: type[_Suite]) -> type[_Suite]:
    """Register a suite under its name."""
    suites.add(cls.name, cls)
    return cls
