"""Count what keeps the house in order, and say where it is not.

    python tools/house.py [src]

Prints one line a measure and exits with 1 if one is over its bound. docs/house.md says why.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
INSTRUCTION_SETS = re.compile(r"\b(avx\w*|amx\w*|neon\w*|i8mm)\b")
LOCKS = re.compile(r"\bthreading\.(R?Lock|Condition|Semaphore)\b|from functools .*cached_property")
SET_ROOMS = {"lowbit.isa", "lowbit.kernels"}
OPERATORS = "lowbit.graph.operators."
# Of each operator of networks and each file that names it. It falls; a new operator adds its own,
# and lm/network.py, which builds graphs, those that the writer has no function for.
NAMINGS = 301  # since 296: BitShift and FloorDiv, and what integers are made of in parts


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


Nodes = dict[type[ast.AST], list[Any]]


def nodes_by_class(tree: ast.AST) -> Nodes:
    """All nodes of a tree, in the order of `ast.walk`."""
    nodes: Nodes = defaultdict(list)
    for node in ast.walk(tree):
        nodes[type(node)].append(node)
    return nodes


class House:
    """The modules of the packages in a folder, their trees and what they import."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = {self._name(path): path for path in sorted(root.rglob("*.py"))}
        self.packages = {name for name, path in paths.items() if path.stem == "__init__"}
        self.texts = {name: path.read_text() for name, path in paths.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        # Walking the trees takes longest, so it is done once: a module's nodes by their class.
        self.nodes = {name: nodes_by_class(tree) for name, tree in self.trees.items()}
        self.imports = {name: set(self._imported(name)) for name in self.trees}

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)

    def _imported(self, importer: str) -> Iterator[str]:
        """Modules of the packages that a module imports, at its top or in a function."""
        nodes = self.nodes[importer]
        names = [alias.name for node in nodes[ast.Import] for alias in node.names]
        for node in nodes[ast.ImportFrom]:
            if node.module and not node.level:
                names += [f"{node.module}.{alias.name}" for alias in node.names]
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
        for importer, nodes in self.nodes.items():
            called = {call.func.id for call in nodes[ast.Call] if isinstance(call.func, ast.Name)}
            if module in self.imports[importer] and name in called:
                yield importer

    def defining(self, name: str) -> Iterator[str]:
        """Modules that have a class or a function of this name."""
        for module, nodes in self.nodes.items():
            for node in (*nodes[ast.ClassDef], *nodes[ast.FunctionDef]):
                if node.name == name:
                    yield module

    def long_functions(self) -> Iterator[str]:
        for module, nodes in self.nodes.items():
            for node in (*nodes[ast.FunctionDef], *nodes[ast.AsyncFunctionDef]):
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
        for module, nodes in self.nodes.items():
            for call in nodes[ast.Call] if module.startswith(OPERATORS) else ():
                if not call.args or not isinstance(call.args[0], ast.Constant):
                    continue
                if ast.unparse(call.func) in ("_add", "operators.add"):
                    yield str(call.args[0].value)

    def naming_operators(self) -> Iterator[tuple[str, str]]:
        """Each operator of networks with each module whose code names it, its record's too."""
        names = set(self.operators())
        for module, nodes in self.nodes.items():
            texts = {node.value for node in nodes[ast.Constant] if isinstance(node.value, str)}
            yield from ((name, module) for name in sorted(names & texts))

    def naming_sets(self) -> Iterator[str]:
        """Modules outside of isa/ and kernels/ whose code names an instruction set."""
        for module, nodes in self.nodes.items():
            if self.room(module) in SET_ROOMS:
                continue
            docs = {id(node.value) for node in nodes[ast.Expr]}
            for node in nodes[ast.Constant]:
                text = node.value if isinstance(node.value, str) and id(node) not in docs else ""
                if INSTRUCTION_SETS.search(text):
                    yield f"{module}:{node.lineno}: {text[:60]!r}"
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
    ]


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src")
    found = measures(House(root))
    print(*found, sep="\n")
    return int(any(measure.over for measure in found))


if __name__ == "__main__":
    sys.exit(main())
