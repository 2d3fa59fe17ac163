"""A Triton kernel as the compiler's own text of it (TTIR), read back as operations.

The text is asked for after inlining and canonicalization, and needs no GPU and no assembler.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from lowbit_lab.backends.ahead import ELEMENTS
from lowbit_lab.languages.triton import TritonKernel
from lowbit_lab.run.trace import Place


class NotProvedError(RuntimeError):
    """Nothing can be said about the bounds of a kernel; the text says why."""


@dataclass
class Region:
    """A block of operations, and the names of its arguments."""

    arguments: tuple[str, ...] = ()
    ops: list[Op] = field(default_factory=list["Op"])


@dataclass
class Op:
    """One operation. results, operands: SSA names, "%a#1" of several. types: those of its results.
    text: what the line has besides the results."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    text: str
    types: tuple[str, ...] = ()
    place: Place | None = None
    regions: list[Region] = field(default_factory=list[Region])

    def __str__(self) -> str:
        return f"{self.name} at {self.place}" if self.place else self.name

    def number(self, attribute: str) -> int:
        """The value of an integer attribute."""
        found = re.search(rf"\b{attribute} = (-?\d+)", self.text)
        assert found is not None
        return int(found[1])


@dataclass(frozen=True)
class Text:
    """A kernel: its parameters that are no constants, by their SSA names, and its body."""

    parameters: Mapping[str, str]
    body: Region


TYPE = re.compile(
    r"tensor<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>|!tt\.[\w.]+(?:<(?:[^<>]|<[^<>]*>)*>)?"
    r"|\b(?:i\d+|index|f\d+\w*|bf16|tf32)\b"
)
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)")
_DEFINED = re.compile(r"(#loc\d*) = loc\((.*)\)$")
_RESULTS = re.compile(r"(%[\w$.-]+(?::\d+)?(?:, %[\w$.-]+(?::\d+)?)*) = ")
_NAME = re.compile(r'"?([a-z_]+\.[\w.]+)"?')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")


def text_of(kernel: TritonKernel, arguments: Mapping[str, Any], dtypes: Mapping[str, str]) -> Text:
    """The text of a kernel with these arguments, by name; dtypes: of those that are tensors.

    NotProvedError if an argument is of no kind that is known here; and what the compiler raises.
    """
    if not kernel.on_gpu:
        raise NotProvedError("TRITON_INTERPRET=1 made it, which no compiler takes")
    constants = {one.name for one in kernel.parameters if one.constant}
    signature, fixed = dict[str, str](), dict[tuple[int, ...], Any]()
    for place, parameter in enumerate(kernel.parameters):
        name, value = parameter.name, arguments[parameter.name]
        kind = "constexpr" if name in constants else _kind(name, value, dtypes)
        signature[name] = kind
        if kind == "constexpr":
            fixed[(place,)] = value
    return _parsed(_lowered(kernel.jitted, signature, fixed), signature)


def _kind(name: str, value: Any, dtypes: Mapping[str, str]) -> str:
    if name in dtypes:
        return f"*{ELEMENTS[dtypes[name]]}"
    if value is None:
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise NotProvedError(f"{name} is a {type(value).__name__}")


def is_gluon(jitted: Any) -> bool:
    """Whether this is a kernel in Gluon, which has no interpreter."""
    return type(jitted).__name__ == "GluonJITFunction"


def _lowered(jitted: Any, signature: Mapping[str, str], fixed: Mapping[Any, Any]) -> str:
    from triton._C.libtriton import passes
    from triton.compiler import ASTSource

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the launch itself shows what Triton warns of
        if not is_gluon(jitted):
            return _text_after(
                passes.common, ASTSource(jitted, dict(signature), dict(fixed), {}), num_warps=4
            )
        from triton.experimental.gluon._runtime import GluonASTSource

        layouts = [one.warps_per_cta for one in fixed.values() if hasattr(one, "warps_per_cta")]
        source = GluonASTSource(jitted, dict(signature), dict(fixed), {})
        return _text_after(passes.gluon, source, num_warps=prod(layouts[0]) if layouts else 4)


def _text_after(passes: Any, source: Any, **options: Any) -> str:
    """The text after helpers are put in place, and what is known is computed."""
    from triton._C.libtriton import ir
    from triton._C.libtriton import passes as others
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend: Any = make_backend(target)
    made = backend.parse_options({"enable_fp_fusion": True, **options})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(made), backend.get_module_map()
    module = source.make_ir(target, made, functions, modules, context)
    manager = ir.pass_manager(context)
    manager.enable_debug()  # with locations
    passes.add_inliner(manager)
    passes.add_canonicalizer(manager)
    others.common.add_cse(manager)
    others.common.add_symbol_dce(manager)
    manager.run(module, "bounds")
    return str(module)


def _parsed(text: str, signature: Mapping[str, str]) -> Text:
    places = _Places(text)
    whole = Region()
    open_: list[tuple[Op, Region]] = []
    parameters: dict[str, str] = {}
    region = whole
    for line in map(str.strip, text.splitlines()):
        location = _LOCATION.findall(line)
        plain = _LOCATION.sub("", line).strip()
        if plain.startswith("tt.func"):
            names = [name for name, kind in signature.items() if kind != "constexpr"]
            found = re.findall(r"%[\w$.-]+", plain.partition(" attributes ")[0])
            if len(names) != len(found):
                raise NotProvedError("its parameters are not those of the compiled kernel")
            parameters.update(zip(found, names, strict=True))
            region = whole
        elif plain.startswith("^"):
            named = tuple(_VALUE.findall(plain.partition("//")[0]))
            if region is whole:  # of several blocks, which branches connect
                region.ops.append(Op("block", named, (), plain[1:].partition(":")[0]))
            region.arguments = named
        elif plain in ("} else {", "} do {"):
            op = open_[-1][0]
            region = Region()
            op.regions.append(region)
        elif plain.startswith("}") and open_:
            op, region = open_.pop()
            op.types = op.types or _types(plain)
            op.place = places.of(location[-1]) if location else None
        elif plain and not plain.startswith(("module", "#", "}")):
            op = _op(plain)
            region.ops.append(op)
            if plain.endswith("{"):
                open_.append((op, region))
                region = Region()
                op.regions.append(region)
            else:
                op.place = places.of(location[-1]) if location else None
    return Text(parameters, whole)


def _op(line: str) -> Op:
    found = _RESULTS.match(line)
    text = line[found.end() :] if found else line
    results = tuple(_named(found[1].split(", "))) if found else ()
    name = _NAME.match(text)
    if name is None:
        raise NotProvedError(f"the line {line!r} of Triton's text is not understood")
    # What has a region that is no loop or branch has its types behind it.
    types = () if text.endswith("{") and not name[1].startswith("scf.") else _types(text)
    return Op(name[1], results, tuple(_VALUE.findall(text)), text, types)


def _named(results: list[str]) -> Iterator[str]:
    """The names of results, "%a:2" being two."""
    for base, _, count in (one.partition(":") for one in results):
        yield from (f"{base}#{i}" for i in range(int(count))) if count else (base,)


def _types(text: str) -> tuple[str, ...]:
    """The types of results: those behind an arrow, else the last ones."""
    where = text.rpartition("->")[2] if "->" in text else text.rpartition(" : ")[2]
    return tuple(TYPE.findall(where.partition(" : ")[0] if "->" in text else where))


class _Places:
    """The lines of the kernel's file, by the names of locations."""

    def __init__(self, text: str) -> None:
        import triton

        self._triton = str(Path(triton.__file__).parent)
        lines = map(str.strip, text.splitlines())
        matches = [found for line in lines if (found := _DEFINED.match(line))]
        self._defined = {found[1]: found[2] for found in matches}

    def of(self, location: str) -> Place | None:
        """The innermost line that is not Triton's own."""
        return next((p for p in self._all(location) if not p.file.startswith(self._triton)), None)

    def _all(self, location: str) -> Iterator[Place]:
        for file, line, name in re.findall(r'"([^"]*)":(\d+):\d+|(#loc\d*)', location):
            if name and name in self._defined:
                yield from self._all(self._defined[name])
            elif file:
                yield Place(file, int(line))
