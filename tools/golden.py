"""Golden files: what products, networks and benchmarks are made of, for machines that are stated.

    python tools/golden.py [PART ...]     compares with tests/golden, and names what differs
    python tools/golden.py --write        writes tests/golden anew
    python tools/golden.py --show TEXT    prints all launches, with words, of lines that hold TEXT

Parts are `calls-MACHINE`, `networks-MACHINE` and `benchmarks`. Kernels are emitted and not run, so
a machine need not be this one. Of each launch two things are kept: its program (name, instruction
set and a hash of the LLVM IR), and its words that are no addresses, by name, with its threads. To
see what changed, `--show` a line in both trees and compare. A line that may change is written anew
in the commit that changes it, which says why.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "golden"
THREADS, WORKERS = 8, 2


class Machine(NamedTuple):
    """What dispatch reads of a machine. sets: levels, best first, and extensions."""

    cpu: str
    vendor: str
    l1d: int
    l2: int
    l3: int
    sets: tuple[str, ...]
    architecture: str = "x86_64"


X86 = ("avx512_vnni", "avx512_vbmi", "avx512_bf16", "avx512", "avx2_vnni", "avx2", "generic")
ARM = ("neon_i8mm", "neon_dotprod", "generic")
MACHINES = {
    "emeraldrapids": Machine("emeraldrapids", "GenuineIntel", 48 << 10, 2 << 20, 260 << 20,
                             ("amx", "amx_bf16", *X86)),
    "znver4": Machine("znver4", "AuthenticAMD", 32 << 10, 1 << 20, 32 << 20, X86),
    "neoverse": Machine("neoverse-v1", "", 64 << 10, 1 << 20, 32 << 20, ARM, "aarch64"),
}  # fmt: skip
PARTS = (*(f"{kind}-{name}" for name in MACHINES for kind in ("calls", "networks")), "benchmarks")
PACKERS = {"pack", "weight_words", "quantize_groups"}
"""Kernels that are run, by code for any machine: dispatch looks at what they make."""


class Launch(NamedTuple):
    """One launch: its program, and its words as text."""

    program: str
    words: str


launched: list[Launch] = []
programs: set[str] = set()


def pretend(machine: Machine) -> None:
    """Be this machine, and note launches in place of making them."""
    from lowbit import isa
    from lowbit.isa import host, instruction_set
    from lowbit.isa.types import Pointer
    from lowbit.jit import kernel
    from lowbit.jit.launch import moved
    from lowbit.product import prepared

    caches = {"L1d": machine.l1d, "L2": machine.l2, "L3": machine.l3}
    for name, value in {"cpu_name": machine.cpu, "vendor": machine.vendor, "caches": caches,
                        "architecture": machine.architecture}.items():  # fmt: skip
        setattr(host, name, lambda value=value: value)

    def missing(one: Any) -> str:
        return "" if one.name in machine.sets else f"{machine.cpu} lacks {one.name}"

    setattr(instruction_set.InstructionSet, "missing", missing)  # noqa: B010
    for cached in (host.read_ahead, isa.available, isa.get, isa.active):
        cached.cache_clear()
    build = kernel.Kernel._build

    class Noted(kernel.Program):
        def __init__(self, text: Any, set_: Any, static: dict[str, Any]) -> None:
            digest = sha256(text.ir(set_, **static).encode()).hexdigest()[:12]
            self.label = f"{text.name} {set_.name} {digest}"
            programs.add(self.label)
            self.name, self.isa, self.names, self.sizes = text.name, set_, tuple(text.types), ()
            self.address = 0
            self.numbers = [n for n, type_ in text.types.items() if not isinstance(type_, Pointer)]

        def bind(self, thread_count: int, varying: Any, /, **fixed: Any) -> Callable[..., None]:
            def call(*given: Any) -> None:
                self(thread_count, {**fixed, **dict(zip(varying, given, strict=True))})

            return call

        def __call__(self, thread_count: int, *given: Any) -> None:
            single = len(given) == 1 and isinstance(given[0], dict)
            words = given[0] if single else dict(zip(self.names, given, strict=True))
            numbers = (f"{n}={int(words[n] or 0)}" for n in self.numbers)
            launched.append(Launch(self.label, " ".join((f"threads={thread_count}", *numbers))))

        def cached_call(self, *given: Any, **named: Any) -> None:
            """No call is known: each is decided anew."""

    def noted(text: Any, set_: Any, static: dict[str, Any]) -> Any:
        own = Noted(text, set_, static)
        return build(text, isa.GENERIC, static) if text.name in PACKERS else own

    def one_by_one(launches: Any, threads: int) -> tuple[Callable[..., None], Sequence[str]]:
        names = tuple(dict.fromkeys(name for launch in launches for name in launch.buffers()))

        def call(*given: Any) -> None:
            operands = dict(zip(names, given, strict=True))
            for launch in launches:
                places = launch.places.items()
                found = {name: moved(operands[at.buffer], at.offset) for name, at in places}
                words = {**launch.words, **found}
                launch.program(threads, *(words[name] for name in launch.program.names))

        return call, names

    setattr(kernel.Kernel, "_build", noted)  # noqa: B010
    setattr(prepared, "_bound", one_by_one)  # noqa: B010


def digest(parts: Any) -> str:
    """A few digits that tell texts apart."""
    return sha256("\n".join(parts).encode()).hexdigest()[:4]


def line(name: str, groups: dict[str, list[Launch]], show: str | None) -> str:
    """One line: for each instruction set, best first, hashes of the programs and of the words."""
    if show is not None:
        return "".join(f"{name} | {key} | {one.program} | {one.words}\n"
                       for key, launches in groups.items() for one in launches)  # fmt: skip
    cells = (f"{digest(one.program for one in some)}.{digest(one.words for one in some)}"
             for some in groups.values())  # fmt: skip
    return f"{name} | {' '.join(cells)}\n"


def wanted(name: str, show: str | None, share: int) -> bool:
    """Whether a line is asked for: it holds the text, and is of the share."""
    return (show is None or show in name) and crc32(name.encode()) % share == 0


def calls(show: str | None, share: int) -> Iterator[str]:
    """Public functions, on every set, with one thread and with those of the machine."""
    from golden_cases import requested

    from lowbit import isa

    for name, call in requested():
        if not wanted(name, show, share):
            continue
        groups: dict[str, list[Launch]] = {}
        for level in isa.available():
            for threads in (1, None):
                launched.clear()
                call(isa=level, threads=threads)
                groups.setdefault(level, []).extend(launched)
        yield line(name, groups, show)


def networks(show: str | None, share: int) -> Iterator[str]:
    """The steps of plans: for the best set, and for the others of the machine in short."""
    from golden_cases import graphs

    from lowbit import isa
    from lowbit.graph import Session

    for name, make in graphs():
        if not wanted(name, show, share):
            continue
        groups: dict[str, list[Launch]] = {}
        first: list[Launch] = []
        graph, inputs = make()
        large = name.startswith("bench")
        for level in isa.available()[: 1 if large else None]:
            for threads in (1, THREADS):
                try:
                    plan = Session(graph, threads=threads, isa=level).plan(inputs)
                    steps = list(written(plan))
                except NotImplementedError:  # whose text may change
                    steps = [Launch("refused - - -", "")]
                first = first or steps
                groups.setdefault(level, []).extend(steps)
        yield line(name, groups, show)
        if show is None and isa.available()[0] == "amx" and not name.startswith("operator"):
            for one in first:  # so that a difference has a place
                node, kernel, _, code = one.program.rsplit(" ", 3)
                yield f"  {node} {kernel} {code[:4]} {digest([one.words])}\n"


def written(plan: Any) -> Iterator[Launch]:
    """Steps with addresses numbered as they first appear, and their buffers' offsets."""
    outside = {one.buffer: f"{kind}{i}" for kind, some in (("in", plan.inputs),
               ("out", plan.outputs)) for i, one in enumerate(some)}  # fmt: skip
    numbers: dict[Any, int] = {}

    def text(name: str, word: Any, pointer: bool) -> str:
        if hasattr(word, "buffer"):
            if word.buffer in outside:
                place = outside[word.buffer]
            elif word.buffer in plan.arena.offsets:
                place = f"arena+{plan.arena.offsets[word.buffer]}"
            else:
                place = f"known{numbers.setdefault(word.buffer, len(numbers))}"
            return f"{name}={place}+{word.offset}"
        if word is None or not pointer:
            return f"{name}={int(word or 0)}"
        address = word if isinstance(word, int) else id(word)
        return f"{name}=" + (
            f"known{numbers.setdefault(address, len(numbers))}" if address else "0"
        )

    for step in plan.steps:
        plain = step.program.numbers
        words = (text(n, step.words[n], n not in plain) for n in step.program.names)
        yield Launch(f"{step.node} {step.program.label}", " ".join(words))
    yield Launch("arena - - -", f"size={plan.arena.size} threads={plan.threads}")


def benchmarks(show: str | None) -> Iterator[str]:
    """The cases of every suite and who takes part, for seed 0."""
    from golden_cases import suites_with_options

    for title, suite in suites_with_options():
        names = (f"{one.kind} {one.name}" for one in suite.implementations())
        yield f"{title}: {'; '.join(names)}\n"
        for case in suite.cases(0):
            sizes = " ".join(map(str, case.sizes.values()))
            found = f"  {case} | {case.work} | {sizes}\n"
            if show is None or show in found:
                yield found


def made(part: str, show: str | None, share: int) -> Iterator[str]:
    """The lines of a part, in this process."""
    kind, _, name = part.partition("-")
    if not name:
        yield from benchmarks(show)
        return
    pretend(MACHINES[name])
    yield from {"calls": calls, "networks": networks}[kind](show, share)
    if show is None and share == 1:  # all of a kernel and a set, also those that pack
        groups: dict[str, list[str]] = {}
        for label in sorted(programs):
            groups.setdefault(label.rpartition(" ")[0], []).append(label)
        yield from (f"programs {k} | {len(some)} {digest(some)}\n" for k, some in groups.items())


def output(part: str, show: str | None, share: int) -> str:
    """What a process prints that makes a part, and is told nothing by this one's environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOWBIT_", "OMP_", "KMP_"))}
    paths = [ROOT / one for one in ("tools", "src", "tests/helpers", ".")]
    kept |= {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    more = [] if show is None else ["--show", show]
    command = [sys.executable, __file__, "--make", part, "--share", str(share), *more]
    return subprocess.run(
        command, env=kept, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def blocks(text: str) -> dict[str, str]:
    """Lines by what they begin with, each with those below it."""
    parts = re.split(r"\n(?! )", text.strip())
    return {re.split(r" \| |\n", part)[0]: part for part in parts if part}


def differences(part: str, text: str, share: int) -> Iterator[str]:
    """What of a part is not as its golden file says, line by line: - before, + now."""
    path = FOLDER / f"{part}.txt"
    before, now = blocks(path.read_text() if path.exists() else ""), blocks(text)
    for name in {**before, **now}:
        old, new = before.get(name, ""), now.get(name, "")
        expected = wanted(name, None, share) or part == "benchmarks"
        if old == new or not (new or expected) or (share > 1 and name.startswith("programs ")):
            continue
        yield f"{part}: {name}"
        changed = unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        yield from (f"    {one}" for one in changed if not one.startswith(("---", "+++", "@@")))


def wrong_parts(parts: Sequence[str], share: int = 1) -> list[str]:
    """What differs from the golden files, of every line or one in so many."""
    wrong: list[str] = []
    with ThreadPoolExecutor(WORKERS) as pool:
        texts = pool.map(lambda part: output(part, None, share), parts)
        for part, text in zip(parts, texts, strict=True):
            wrong += differences(part, text, share)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with, write or show golden files.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--show", metavar="TEXT")
    parser.add_argument("--share", type=int, default=1, help="one line in so many")
    parser.add_argument("--make", metavar="PART", help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts = given.parts or PARTS
    if given.make:
        np.seterr(all="ignore")
        sys.stdout.writelines(made(given.make, given.show, given.share))
    elif given.show is not None or given.write:
        for part in parts:
            text = output(part, given.show, 1)
            if given.write:
                FOLDER.mkdir(exist_ok=True)
                (FOLDER / f"{part}.txt").write_text(text)
            else:
                print(text, end="")
    else:
        wrong = wrong_parts(parts, given.share)
        print(*wrong, sep="\n", end="\n" if wrong else "")
        return int(bool(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
