"""llvm-mca's verdict on an inner loop: what it should take by LLVM's model of a processor."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

from lowbit.isa.instruction_set import InstructionSet

_OLDEST = 16
_ITERATIONS = 100
_VERSION = re.compile(r"LLVM version (\d+)")
_WANTED = re.compile(
    r"^(Iterations|Instructions|Total Cycles|uOps Per Cycle|IPC|Block RThroughput)"
)
_PRESSURE = re.compile(
    r"^\s*- (Resource Pressure|Register Dependencies|Data Dependencies|Memory Dependencies).*\["
)


@cache
def _tool() -> str | None:
    """The newest llvm-mca that is new enough."""
    names = [f"llvm-mca-{n}" for n in range(_OLDEST + 14, _OLDEST - 1, -1)] + ["llvm-mca"]
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found = _VERSION.search(done.stdout)
        if found and int(found[1]) >= _OLDEST:
            return path
    return None


def verdict(loop: Sequence[str], isa: InstructionSet) -> tuple[str, ...]:
    """What llvm-mca says of a loop's instructions on the processor that it runs on; or one line
    that says why it says nothing."""
    tool = _tool()
    if not loop:
        return ("llvm-mca: there is no loop",)
    if tool is None:
        return (f"llvm-mca: no LLVM {_OLDEST} or newer is installed; apt-get install llvm-16",)
    if isa.is_foreign:
        return (f"llvm-mca: {isa.name} is not this machine's architecture",)
    text = "\n".join([line for line in loop if not line.startswith("j")]) + "\n"
    # This machine's processor, or where that lacks the instructions, one that has them.
    for cpu in ("native", "sapphirerapids"):
        command = [tool, f"-mcpu={cpu}", f"-iterations={_ITERATIONS}", "-bottleneck-analysis"]
        features = ",".join(f"+{one}" for one in isa.features)
        done = subprocess.run(
            [*command, f"-mattr={features}"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            rows = done.stdout.splitlines()
            said = [f"llvm-mca, {cpu}, {_ITERATIONS} passes"]
            said += [" ".join(row.split()) for row in rows if _WANTED.match(row)]
            said += [" ".join(row.split()) for row in rows if _PRESSURE.match(row)]
            return tuple(said)
    return (f"llvm-mca: {(done.stderr.strip().splitlines() or ['it failed'])[0]}",)
