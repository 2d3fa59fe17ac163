"""What the command line can be told to check."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowbit.lab.check import run
from lowbit.lab.report import CheckResult
from lowbit.lab.source import FUNCTION, OPERATOR


def check_what(what: str, device: str | None = None, **how: Any) -> Iterable[CheckResult]:
    """Check a file, a kernel of lowbit, an operator `gpu:NAME`, a function `cpu:NAME`, or all of a
    kind: `all` (teaching kernels), `gpu`, `cpu`. One result after the other, as they come; `how` as
    `check` takes it. ValueError, with the names that there are, for another name.
    """
    kind, colon, name = what.partition(":")
    if what == "all":
        return run.check_all(device, **how)
    if f"{kind}:" == OPERATOR:
        from lowbit.lab.check.operators import check_gpu

        return check_gpu(name if colon else None, device, **how)
    if f"{kind}:" == FUNCTION:
        from lowbit.lab.check.cpu import check_cpu

        return check_cpu(name if colon else None, **how)
    if what.endswith(".py"):
        return [run.check_file(Path(what), device, **how)]
    return [run.check_named(what, device, **how)]
