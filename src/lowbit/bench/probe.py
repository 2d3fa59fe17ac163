"""Trying a foreign implementation in a process of its own before it may run in ours.

Run as `python -m lowbit.bench.probe NAME SEED DTYPES SHAPE...`; whether that process lives tells
whether the implementation can be trusted with these shapes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowbit.bench.apart import run_apart
from lowbit.bench.implementation import Implementation, find
from lowbit.bench.problem import Problem, gemm_case, shape_of
from lowbit.spec import Case

# oneDNN names what it runs: ...,exec,cpu,matmul,brg_matmul:avx512_core_vnni,...,8x96:96x64,0.1
_ONEDNN_EXEC = re.compile(r"exec,cpu,matmul,(?P<kernel>[^,]+),.*,(?P<shape>\d+x\d+:\d+x\d+),[^,]*$")


@dataclass(frozen=True)
class Trial:
    """How the trial went: `reason` not to use it, or None; the kernel per shape if it told."""

    reason: str | None
    kernels: Mapping[str, str] = field(default_factory=dict)


def attempt(implementation: Implementation, cases: Sequence[Case], seed: int) -> Trial:
    """Run an implementation once on each case, all of the same dtypes, in its own process."""
    shapes = [shape_of(case) for case in cases]
    arguments = [implementation.name, str(seed), cases[0].dtypes, *shapes]
    ended = run_apart("lowbit.bench.probe", arguments, ONEDNN_VERBOSE="1")
    if not ended.well:
        return Trial(ended.how)
    matches = (_ONEDNN_EXEC.search(line) for line in ended.said.splitlines())
    return Trial(None, {match["shape"]: match["kernel"] for match in matches if match})


def main(arguments: Sequence[str]) -> None:
    """Prepare and call the implementation once for each shape."""
    name, seed, dtypes, *shapes = arguments
    for shape in shapes:
        problem = Problem.make(gemm_case(shape, dtypes), int(seed))
        prepared = find(name).prepare(problem, threads=1)
        prepared.read(prepared.call())


if __name__ == "__main__":
    main(sys.argv[1:])
