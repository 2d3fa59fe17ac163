"""Where the view of a wrong kernel opens, and in which order threads stand."""

# pyright: reportOperatorIssue=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from lowbit.spec.exercises import add_constant_blocks
from lowbit_lab import view
from lowbit_lab.views.trace import order_of


@triton.jit
def meets_in_a_loop(x_ptr, z_ptr, N0, B0: tl.constexpr):
    p = tl.program_id(0)
    for j in range(4):
        tl.store(z_ptr + 3 * p + j, tl.load(x_ptr + p) + j)


@triton.jit
def leaves_in_a_loop(x_ptr, z_ptr, N0, B0: tl.constexpr):
    for j in range(N0 + 2):
        tl.store(z_ptr + tl.minimum(j, N0 - 1), tl.load(x_ptr + j))


def findings_of(kernel: Any, grid: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    seen = view(kernel, add_constant_blocks, grid=grid, sizes={"N0": 7}).data
    return seen, seen["findings"]


def test_a_finding_has_the_event_at_its_element() -> None:
    seen, findings = findings_of(meets_in_a_loop, 2)
    conflict = next(one for one in findings if one["kind"] == "write-conflict")
    event = seen["events"][conflict["event"]]
    assert (conflict["element"], event["elements"]) == (3, [3])
    assert event["program"] == 1
    seen, findings = findings_of(leaves_in_a_loop, 1)
    outside = next(one for one in findings if one["kind"] == "out-of-bounds-load")
    event = seen["events"][outside["event"]]
    assert (event["kind"], event["outside"]) == ("load", [[0, 7]])


def test_threads_stand_in_the_order_of_their_numbers() -> None:
    started = [(0, 1, 0, 0, 0, 0), (1, 0, 0, 2, 0, 0), (1, 0, 0, 1, 0, 0), (1, 0, 0, 0, 1, 0)]
    started += [(0, 0, 0, 10, 0, 0), (0, 0, 0, 9, 0, 0)]
    events: Any = [SimpleNamespace(program=program) for program in started]
    assert list(order_of(events)) == [
        (0, 0, 0, 9, 0, 0), (0, 0, 0, 10, 0, 0), (1, 0, 0, 1, 0, 0), (1, 0, 0, 2, 0, 0),
        (1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 0, 0),
    ]  # fmt: skip
    programs: Any = [SimpleNamespace(program=(n, 0, 0)) for n in (1, 0)]
    assert list(order_of(programs)) == [(1, 0, 0), (0, 0, 0)]
