"""The command `lowbit info`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lowbit.cli.application import JsonFile, command, output

if TYPE_CHECKING:
    from rich.table import Table


@command("info", example="info --json -")
def info(json_file: JsonFile = None) -> None:
    """What this machine has and what lowbit uses of it: CPU, instruction sets, caches, threads."""
    with output(json_file) as show:
        facts = _facts()
        show(_table(facts), json.dumps(facts, indent=2))


def _facts() -> dict[str, Any]:
    from lowbit import isa
    from lowbit.jit.threads import max_threads, runtime
    from lowbit.product.dispatch import PRODUCTS, active_kernel
    from lowbit.registry.extras import versions

    return {
        **isa.report(),
        "kernels": {name: list(active_kernel()) for name in PRODUCTS},
        "threads": max_threads(),
        "thread_runtime": runtime(),
        "versions": versions(),
    }


def _table(facts: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("CPU", f"{facts['cpu']} ({facts['model']})")
    for name, one in ((one["name"], one) for one in facts["instruction_sets"]):
        state = "used" if one["used"] else "available" if one["available"] else "no: " + one["why"]
        table.add_row(name, state)
    table.add_row("forced", facts["forced"] or "nothing (LOWBIT_ISA is not set)")
    for op, (kernel, instruction_set) in facts["kernels"].items():
        table.add_row(op, f"kernel {kernel} on {instruction_set}")
    sizes = (f"{name} {size / 1024:,.0f} KiB" for name, size in facts["caches"].items())
    table.add_row("caches", ", ".join(sizes))
    table.add_row("threads", f"{facts['threads']} ({facts['thread_runtime']})")
    versions = (f"{name} {version}" for name, version in facts["versions"].items())
    table.add_row("versions", ", ".join(versions))
    table.add_row("features", " ".join(facts["features"]))
    return table
