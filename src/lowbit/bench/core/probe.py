"""Trying a foreign implementation in a process of its own before it may run in ours."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from lowbit.bench.core.remote import Remote, RemoteError

if TYPE_CHECKING:
    from lowbit.bench.core.case import Case, Implementation
    from lowbit.bench.core.suite import Suite

_SECONDS = 300.0

# oneDNN names what it runs: ...,exec,cpu,matmul,brg_matmul:avx512_core_vnni,...,8x96:96x64,0.1
_ONEDNN_EXEC = re.compile(
    r"exec,cpu,matmul,(?P<kernel>[^,]+),.*,(?P<shape>\d+x\d+:\d+x\d+),[^,\n]*$", re.MULTILINE
)


def attempt(
    suite: Suite, one: Implementation, cases: Sequence[Case], seed: int
) -> tuple[dict[Case, str], dict[str, str]]:
    """Run an implementation once on each case, in a process of its own; after a crash in another
    one, on those that are left.

    By case, why not to use the implementation; by the name of a case, the kernel if it was told.
    """
    reasons: dict[Case, str] = {}
    kernels: dict[str, str] = {}
    left = list(dict.fromkeys(suite.tried(case) for case in cases))
    while left:
        with closing(Remote(_reasons, suite, one, seed, ONEDNN_VERBOSE="1")) as process:
            process.answer(_SECONDS)
            while left:
                case = left.pop(0)
                try:
                    reason = process.ask(case, _SECONDS)
                except RemoteError as error:
                    reasons[case] = f"tried in a process of its own: {error}"
                    break
                if reason is not None:
                    reasons[case] = reason
            found = _ONEDNN_EXEC.finditer(process.printed())
            kernels |= {match["shape"]: match["kernel"] for match in found}
    refused = {case: reasons[suite.tried(case)] for case in cases if suite.tried(case) in reasons}
    return refused, kernels


def _reasons(suite: Suite, one: Implementation, seed: int) -> Generator[str | None, Case, None]:
    """In the process: of each case that it comes through, why not to use the implementation."""
    reason = None
    while True:
        case = yield reason
        reason = None
        try:
            ready = one.prepare(suite.make(case, seed), threads=1)
            ready.read(ready.call())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = "refused: " + str(error).splitlines()[0]
