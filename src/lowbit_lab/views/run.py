"""Making a view: of a kernel, of a file, of a teaching kernel."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from lowbit.registry.files import naming_file
from lowbit.report.page import part
from lowbit.spec import FILLS, Block, Case, Layout, Operation, Sizes
from lowbit_lab.backends.backend import GridLike, Request, Subject, Variant
from lowbit_lab.backends.language import bound
from lowbit_lab.backends.source import (
    blamed,
    in_simulator,
    needs_simulator,
    request_named,
    request_of_file,
)
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.tensor import strides_of
from lowbit_lab.views.trace import SCHEMA, trace_of, view_data

# A view: what one run of a kernel did, as a page of HTML that needs nothing else, and as JSON.

# In the order in which the browser runs them.
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_SCRIPTS = ("grid.js", "step.js", "page.js")
_HEIGHT = 760  # pixels, in a notebook


@dataclass(frozen=True, eq=False)
class View:
    """A run of a kernel, to be looked at. `data` is what docs/view.md describes."""

    data: dict[str, Any]

    def json(self) -> str:
        """Everything that the page shows."""
        return json.dumps(self.data, allow_nan=False, separators=(",", ":"))

    def html(self) -> str:
        """The page: style, script and data are in it, and nothing is loaded."""
        # Inside <script> only "<" can end the data, or start a comment.
        data = self.json().replace("<", "\\u003c")
        title = html.escape(f"{self.data['kernel']} ({self.data['operation']})")
        page = _part("page.html")
        for mark, text in (
            ("{{title}}", title),
            ("{{style}}", part("lowbit.report", "base.css") + _part("page.css")),
            ("{{script}}", "\n".join(_part(name) for name in _SCRIPTS)),
            ("{{data}}", data),
        ):
            before, _, after = page.partition(mark)
            page = before + text + after
        return page

    @classmethod
    def saved(cls, path: str | Path) -> View:
        """The view whose JSON was saved. OSError if it cannot be read; ValueError if it is none, or
        of another version."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no view: {error}") from None
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(
                f"{path} is of the form {schema!r}, and this lowbit shows {SCHEMA!r}; save it "
                "again: lowbit view FILE.py --save FILE.json"
            )
        return cls(data)

    def save(self, path: str | Path) -> Path:
        """Write the page, or the JSON if the name ends in .json; returns where. OSError if it
        cannot be written."""
        target = Path(path)
        text = self.json() + "\n" if target.suffix == ".json" else self.html()
        with naming_file(target):
            target.write_text(text, encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        # A frame, so that neither the notebook's style nor the page's leaks into the other.
        return (
            f'<iframe title="view of {html.escape(self.data["kernel"])}" '
            f'style="width: 100%; height: {_HEIGHT}px; border: 0" '
            f'srcdoc="{html.escape(self.html())}"></iframe>'
        )

    def __repr__(self) -> str:
        steps = counted(len(self.data["events"]), "step")
        programs = counted(len(self.data["programs"]), "program")
        return f"<view of {self.data['kernel']}: {steps} of {programs}>"


def counted(number: int, what: str) -> str:
    """How many, in words: 1 step, 2 steps."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _part(name: str) -> str:
    return part("lowbit_lab.views", name)


MOST_VALUES = 200_000
"""How many lanes and values the steps of a view hold together, unless `limit` says otherwise."""

# Of all tensors together: a page with more is slow, and one with many more of no use.
_MOST_ELEMENTS, _TOO_MANY_ELEMENTS = 40_000, 400_000
_UNKNOWN_SIZE = 40


def view(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    *,
    grid: GridLike | None = None,
    sizes: Sizes | None = None,
    fill: str = "normal",
    layout: Layout = "contiguous",
    output: str | None = None,
    initial: float | None = None,
    seed: int = 0,
    limit: int = MOST_VALUES,
    **given: Block | float,
) -> View:
    """Run a kernel once and show what it does; the arguments are those of `check`.

    sizes: those that are given; the others are the exercise's. With none given they are halved
    until everything can be shown. fill: the data, one of spec.FILLS. layout: how tensors lie, where
    the kernel takes their strides, in a way that `check` names. limit: how many lanes and values
    of steps are kept; what is cut is said on the page.

    Raises as `check` does, and ValueError for a size, fill or layout that is unknown, and for sizes
    that are too large to draw. A kernel that stops with an error is shown as far as it got.
    """
    request = Request(Variant(kernel, grid=grid, constants=given), spec, output, initial, seed)
    return view_request(request, sizes, fill, layout, limit)


def view_file(
    path: Path, sizes: Sizes | None = None, fill: str = "normal", layout: Layout = "contiguous"
) -> View:
    """The view of the kernel of a file; of a Numba kernel in a process where the simulator is on.

    Raises as `check_file` and `view`.
    """
    if needs_simulator(path):
        return in_simulator(partial(view_file, sizes=sizes, fill=fill, layout=layout), path)
    request = request_of_file(path)
    with blamed(path):
        return view_request(request, sizes, fill, layout)


def view_named(
    name: str, sizes: Sizes | None = None, fill: str = "normal", layout: Layout = "contiguous"
) -> View:
    """The view of a kernel of lowbit. ValueError, with the names that there are, for another."""
    return view_request(request_named(name), sizes, fill, layout)


def view_request(
    request: Request,
    sizes: Sizes | None,
    fill: str,
    layout: Layout,
    limit: int = MOST_VALUES,
) -> View:
    """The view of a kernel with what it is held against. Raises as `view`."""
    if fill not in FILLS:
        raise ValueError(f"fill is {fill!r}; it must be one of {', '.join(FILLS)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    if limit < 1:
        raise ValueError(f"limit is {limit}; give how many values to keep, at least 1")
    subject = bound(request)
    shown = Case(subject.operation, _sizes(subject.operation, sizes or {}), fill, layout)
    return view_subject(subject, shown, limit, shrinks=not sizes)


def view_subject(
    subject: Subject,
    case: Case | None,
    limit: int = MOST_VALUES,
    *,
    shrinks: bool = False,
    notes: Sequence[str] = (),
    also: Sequence[Finding] = (),
) -> View:
    """The view of a case; if None, of the exercise. shrinks: halve sizes until all can be shown.
    notes: what stands at the top of the page; also: findings that do not come of this run."""
    notes = list(notes)
    shrinks = (shrinks or case is None) and subject.any_sizes
    shown = case or Case(subject.operation, _sizes(subject.operation, {}))
    exercise = shown.sizes
    while True:
        smaller = _halved(subject.operation, shown.sizes) if shrinks else None
        if smaller is None or _elements(subject.operation, shown.sizes) <= _MOST_ELEMENTS:
            _refuse_huge(subject.operation, shown.sizes)
            trace = trace_of(subject, shown, limit)
            if smaller is None or not trace.recorder.dropped:
                break
        shown = replace(shown, sizes=smaller)
    if shown.sizes != exercise:
        was = ", ".join(f"{name}={size}" for name, size in exercise.items())
        notes.append(f"Shrunk, to show all steps: the exercise has {was}.")
    if shown.layout != "contiguous":
        lies = any(t.strides != strides_of(t.shape, "contiguous") for t in trace.fresh.values())
        contiguous = "The kernel takes no strides, so its tensors are contiguous."
        notes.append(f"The tensors are {shown.layout}." if lies else contiguous)
    return View(view_data(trace, notes, also))


def _sizes(operation: Operation, sizes: Sizes) -> dict[str, int]:
    unknown = dict.fromkeys(operation.names, _UNKNOWN_SIZE)
    exercise = operation.exercise or operation.fitted(unknown)
    strange = [name for name in sizes if name not in operation.names]
    if strange:
        raise ValueError(
            f"{operation.name} has no size {strange[0]!r}; it has {', '.join(operation.names)}"
        )
    empty = [name for name, size in sizes.items() if size < 1]
    if empty:
        least = max(1, operation.least(empty[0]))
        raise ValueError(f"the size {empty[0]} is {sizes[empty[0]]}; give at least {least}")
    return operation.complete({**exercise, **sizes})


def _elements(operation: Operation, sizes: Sizes) -> int:
    types = (*operation.inputs, operation.result)
    return sum(math.prod(tensor.shape(sizes)) for tensor in types)


def _refuse_huge(operation: Operation, sizes: Sizes) -> None:
    elements = _elements(operation, sizes)
    if elements > _TOO_MANY_ELEMENTS:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"with {given} the tensors of {operation.name} have {elements:,} elements, too many to "
            f"draw; give sizes that make it at most {_TOO_MANY_ELEMENTS:,}"
        )


def _halved(operation: Operation, sizes: Sizes) -> dict[str, int] | None:
    """The same with the largest size that can be halved; None if none can."""
    smaller = list[dict[str, int]]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        step = operation.step(name)
        half = -(-sizes[name] // 2)
        rounded = -(-half // step) * step
        halved = operation.fitted({**sizes, name: min(rounded, sizes[name] - step)})
        smaller += [halved] if halved[name] < sizes[name] else []
    return next(iter(smaller), None)
