"""Count what keeps the house in order, and say where it is not.

    python tools/house.py [src]

Prints one line a measure and exits with 1 if one is over its bound. docs/house.md says why.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# From the top; a room uses what stands below it, never above: so `lowbit` nothing of `lowbit_lab`.
# A module is in the room of its longest name here.
TOOLS = ("__main__", "cli", "demo", "", "bench")
LIBRARY = (
    "__main__", "cli", "models", "report", "lm", "torch", "graph", "search", "api", "product",
    "weights", "kernels", "jit", "isa", "spec", "numerics", "registry",
)  # fmt: skip
ROOMS = (*(f"lowbit_lab.{name}".strip(".") for name in TOOLS), *(f"lowbit.{n}" for n in LIBRARY))
AT_THE_ROOT = {"__init__", "__main__", "api"}
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 500, 60
# It falls with the lines: it stays within a step above them. Whoever must raise it writes here what
# the lines bought. From 75,300: what is put in order or written by indices, and
# mixtures of experts (1,500); recurrent layers, GatherND, Col2Im, loops (900); warp functions and
# files of one's own in compare and anatomy (750); code without loops in trace, forks, and calls of
# many sizes (600); language models: files, networks, caches (1,900), tokenizers, templates,
# sampling, `generate` and `chat` (1,100), weights of 8 bits in groups (100), windows, caps, Gemma
# and experts (750), folders of quantized weights (350); `bench lm` and the demo's answer (1,100),
# `convert` and `quantize` of language models (720), models of transformers (620), 8-bit caches and
# attention that reads them once (500), batches and guesses (440), beginnings that prompts share,
# full chats and reports (70); on GPUs language models (1,250), layers cut among several (330),
# attention over caches (1,000), products of 8 bits (550) and of one packing for all rows of x
# (250), rows and convolutions (350), gates and experts (640), 8-bit by 4-bit products and blocks
# (600), `bench linear`, tables, `bench tune`, `explain` (1,640); the checker: which order atomic
# operations make, sizes, layouts, compilers (420), undefined lanes, roundings, ranges,
# offsets (800), any program watched (950), bounds proved (1,300), the view of a smaller case, of
# variables and costs, exercises as they come, notebooks (1,200), several results and sums that a
# result keeps (150).
LINES, STEP = {"lowbit": 64_350, "lowbit_lab": 30_750}, 250
INSTRUCTION_SETS = re.compile(r"\b(avx\w*|amx\w*|neon\w*|i8mm)\b")
LOCKS = re.compile(r"\bthreading\.(R?Lock|Condition|Semaphore)\b|from functools .*cached_property")
SET_ROOMS = {"lowbit.isa", "lowbit.kernels"}
OPERATORS = "lowbit.graph.operators."
# Of each operator of networks and each file that names it. It falls; a new operator adds its own,
# and lm/network.py, which builds graphs, those that the writer has no function for.
NAMINGS = 296


@dataclass(frozen=True)
class Measure:
    """One thing that is counted: the places where it was found, and how many there may be."""

    name: str
    found: tuple[str, ...]
    bound: int = 0

    @property
    def over(self) -> bool:
        return len(self.found) > self.bound

    def __str__(self) -> str:
        mark = "over" if self.over else "ok"
        places = "".join(f"\n    {place}" for place in self.found) if self.over else ""
        return f"{mark:4}  {self.name}: {len(self.found)} (at most {self.bound}){places}"


class House:
    """The modules of the packages in a folder, their trees and what they import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = {self._name(path): path for path in sorted(root.rglob("*.py"))}
        self.packages = {name for name, path in paths.items() if path.stem == "__init__"}
        self.texts = {name: path.read_text() for name, path in paths.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.imports = {name: set(self._imported(name)) for name in self.trees}

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def _imported(self, importer: str) -> Iterator[str]:
        """Modules of the packages that a module imports, at its top or in a function."""
        for node in ast.walk(self.trees[importer]):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                while name and name not in self.trees:
                    name = name.rpartition(".")[0]
                if "." in name and name != importer:
                    yield name

    def room(self, module: str) -> str:
        while module and module not in ROOMS:
            module = module.rpartition(".")[0]
        return module

    def folder(self, module: str) -> str:
        return module if module in self.packages else module.rpartition(".")[0]

    def upward(self) -> Iterator[str]:
        """Imports that climb from a room to one above it."""
        height = {room: -index for index, room in enumerate(ROOMS)}
        for module, imported in self.imports.items():
            here = self.room(module)
            if not here and module not in self.packages:
                yield f"{module} is in no room"
            for name in sorted(imported) if here else ():
                if height.get(self.room(name), 0) > height[here]:
                    yield f"{module} imports {name}"

    def circles(self) -> Iterator[tuple[str, ...]]:
        """Sets of modules that import each other in a circle."""
        reach = {name: self._reachable(name) for name in self.imports}
        seen: set[str] = set()
        for name in self.imports:
            circle = {other for other in reach[name] if name in reach[other]}
            if name in reach[name] and name not in seen:
                seen |= circle
                yield tuple(sorted(circle))

    def _reachable(self, start: str) -> set[str]:
        reached: set[str] = set()
        waiting = list(self.imports[start])
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(self.imports.get(name, ()))
        return reached

    def calls(self, module: str, name: str) -> Iterator[str]:
        """Modules that call what another one defines, by its own name."""
        for importer, tree in self.trees.items():
            called = {
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            if module in self.imports[importer] and name in called:
                yield importer

    def defining(self, name: str) -> Iterator[str]:
        """Modules that have a class or a function of this name."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                    yield module

    def long_functions(self) -> Iterator[str]:
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > LINES_OF_A_FUNCTION:
                        yield f"{module}.{node.name}: {length} lines"

    def holding(self, text: str) -> Iterator[str]:
        return (module for module, content in self.texts.items() if text in content)

    def locking(self) -> Iterator[str]:
        """Modules with locks that are not from registry/locks.py."""
        for module, content in self.texts.items():
            if not module.endswith("registry.locks") and LOCKS.search(content):
                yield module

    def operators(self) -> Iterator[str]:
        """The operators of networks that have a record."""
        for module, tree in self.trees.items():
            if not module.startswith(OPERATORS):
                continue
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                made = ast.unparse(node.func) in ("_add", "operators.add")
                if made and isinstance(node.args[0], ast.Constant):
                    yield str(node.args[0].value)

    def naming_operators(self) -> Iterator[tuple[str, str]]:
        """Each operator of networks with each module whose code names it, its record's too."""
        names = set(self.operators())
        for module, tree in self.trees.items():
            found = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)
                     and isinstance(n.value, str)}  # fmt: skip
            yield from ((name, module) for name in sorted(names & found))

    def naming_sets(self) -> Iterator[str]:
        """Modules outside of isa/ and kernels/ whose code names an instruction set."""
        for module, tree in self.trees.items():
            if self.room(module) in SET_ROOMS:
                continue
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                value = node.value if isinstance(node, ast.Constant) else None
                if (
                    isinstance(value, str)
                    and id(node) not in docs
                    and INSTRUCTION_SETS.search(value)
                ):
                    yield f"{module}:{node.lineno}: {value[:60]!r}"
                    break


def measures(house: House) -> list[Measure]:
    modules = [name for name in house.texts if re.fullmatch(r"lowbit\.\w+", name)]
    loose = [
        name
        for name in modules
        if house.folder(name) != name and name.rpartition(".")[2] not in AT_THE_ROOT
    ]
    crossing = [
        " ↔ ".join(circle)
        for circle in house.circles()
        if len({house.folder(name) for name in circle}) > 1
    ]
    long_files = [
        f"{name}: {text.count(chr(10))} lines"
        for name, text in house.texts.items()
        if text.count("\n") > LINES_OF_A_FILE
    ]
    stating = tuple(house.calls("lowbit.product.product", "Product"))
    namings = tuple(f"{name} in {module}" for name, module in house.naming_operators())
    return [
        Measure("modules at the root", tuple(loose)),
        Measure("imports that climb", tuple(house.upward())),
        Measure("circles of files that cross a folder", tuple(crossing)),
        Measure("places that state a product", stating, 1),
        Measure("languages of specification", tuple(house.defining("Operation")), 1),
        Measure("benchmark runners", tuple(house.defining("interleave")), 1),
        Measure("lookups of OpenMP", tuple(house.holding("GOMP_parallel")), 2),
        # That of compilations, which forks wait for, and one of simulated threads.
        Measure("locks that no fork renews", tuple(house.locking()), 2),
        Measure("import loops", tuple(house.holding("pkgutil.")), 1),
        Measure("files that are too long", tuple(long_files)),
        Measure("functions that are too long", tuple(house.long_functions())),
        Measure("names of instruction sets elsewhere", tuple(house.naming_sets())),
        Measure("files in which operators are named, over all operators", namings, NAMINGS),
        *bounds(house),
    ]


def bounds(house: House) -> Iterator[Measure]:
    """Of each package's lines: no more than its bound, which is not far above them."""
    for package, bound in LINES.items():
        texts = [text for name, text in house.texts.items() if name.split(".")[0] == package]
        lines = sum(text.count("\n") for text in texts)
        thousands = max(0, -(-(lines - bound) // 1000))
        yield Measure(f"{package}: thousands over {bound:,} lines", (f"{lines:,}",) * thousands)
        better = f"{lines:,} lines: the bound is to be {-(-lines // 50) * 50:,}"
        too_high = (better,) if bound - lines >= STEP else ()
        yield Measure(f"{package}: bound of lines that is {STEP} too high", too_high)


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src")
    found = measures(House(root))
    print(*found, sep="\n")
    return int(any(measure.over for measure in found))


if __name__ == "__main__":
    sys.exit(main())
