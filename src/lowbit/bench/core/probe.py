"""Trying a foreign implementation in a process of its own before it may run in ours.

Run as `python -m lowbit.bench.core.probe TASK`; it prints a line for each case that it comes
through: as JSON, the reason not to use the implementation there, or null.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowbit.bench.core.apart import run_apart

if TYPE_CHECKING:
    from lowbit.bench.core.case import Case, Implementation
    from lowbit.bench.core.suite import Suite

# oneDNN names what it runs: ...,exec,cpu,matmul,brg_matmul:avx512_core_vnni,...,8x96:96x64,0.1
_ONEDNN_EXEC = re.compile(r"exec,cpu,matmul,(?P<kernel>[^,]+),.*,(?P<shape>\d+x\d+:\d+x\d+),[^,]*$")


@dataclass(frozen=True)
class Trial:
    """How a trial went: by case, why not to use the implementation; by the name of a case, the
    kernel if it was told."""

    reasons: Mapping[Case, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)


def attempt(suite: Suite, one: Implementation, cases: Sequence[Case], seed: int) -> Trial:
    """Run an implementation once on each case, in a process of its own; after a crash in another
    one, on those that are left."""
    reasons: dict[Case, str] = {}
    kernels: dict[str, str] = {}
    tried = list(dict.fromkeys(suite.tried(case) for case in cases))
    while tried:
        task = base64.b64encode(pickle.dumps((suite, one, tried, seed))).decode()
        ended = run_apart("lowbit.bench.core.probe", [task], ONEDNN_VERBOSE="1")
        lines = ended.said.splitlines()
        matches = filter(None, map(_ONEDNN_EXEC.search, lines))
        kernels |= {match["shape"]: match["kernel"] for match in matches}
        told = _told(lines)
        reasons |= {case: why for case, why in zip(tried, told, strict=False) if why is not None}
        if len(told) < len(tried):  # the one after the last line ended it; the others are left
            reasons[tried[len(told)]] = ended.how
        tried = tried[len(told) + 1 :]
    refused = {case: reasons[suite.tried(case)] for case in cases if suite.tried(case) in reasons}
    return Trial(refused, kernels)


def _told(lines: Sequence[str]) -> list[str | None]:
    """What the process wrote; a library may have written as well."""
    found = []
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and "refused" in one:
            found.append(one["refused"])
    return found


def main(arguments: Sequence[str]) -> None:
    """Prepare and call the implementation once for each case."""
    suite, one, cases, seed = pickle.loads(base64.b64decode(arguments[0]))
    for case in cases:
        reason = None
        try:
            ready = one.prepare(suite.make(case, seed), threads=1)
            ready.read(ready.call())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = "refused: " + str(error).splitlines()[0]
        print(json.dumps({"refused": reason}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
