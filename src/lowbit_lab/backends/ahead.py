"""Triton kernels, compiled for a GPU that is not there: with which types, and what the compiler
says against them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit_lab.run.bind import TensorArgument
from lowbit_lab.run.trace import Place

if TYPE_CHECKING:
    from lowbit.kernels.triton.ahead import Compiled

ELEMENTS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8",
    "uint8": "u8", "int16": "i16", "uint16": "u16", "int32": "i32", "uint32": "u32",
    "int64": "i64", "uint64": "u64", "bool": "i1", "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8", "float8_e5m2": "fp8e5", "float8_e5m2fnuz": "fp8e5b16",
}  # fmt: skip


def compiled(
    kernel: Any, arguments: Mapping[str, Any], dtypes: Mapping[str, str], sm: int, **options: Any
) -> Compiled:
    """A TritonKernel for a compute capability, with these arguments; dtypes: of the tensors. Raises
    what Triton's compiler raises."""
    from lowbit.kernels.triton.ahead import compile_ahead

    constants = {one.name for one in kernel.parameters if one.constant}
    given = {
        name: value if name in constants else _signature(value, dtypes)
        for name, value in kernel.decided(arguments).items()
    }
    return compile_ahead(kernel.jitted, given, sm, **options)


def _signature(value: Any, dtypes: Mapping[str, str]) -> Any:
    """What `compile_ahead` takes for an argument, as a launch would specialize it."""
    if isinstance(value, TensorArgument):
        return f"*{ELEMENTS[value.dtype or dtypes[value.name]]}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        return 1
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    return kind if value % 16 == 0 else f"{kind}:1"


_DEFINED = re.compile(
    r'^(#\w+) = loc\((?:"([^"]*)":(\d+):\d+|"([^"]*)"\((#\w+)\)|callsite\((#\w+))'
)


class Locations:
    """Where rows of a compiler's text come from, by #loc names that are defined at its end."""

    def __init__(self, text: str) -> None:
        rows = (_DEFINED.match(row) for row in text.splitlines())
        self._defined = {one[1]: one for one in rows if one is not None}

    def place(self, name: str) -> Place | None:
        """The line, of what is inlined that of the inlined text; None if it is not known."""
        while (one := self._defined.get(name)) is not None and not one[3]:
            name = one[5] or one[6]
        return None if one is None else Place(one[2], int(one[3]))

    def variable(self, name: str) -> str:
        """What the text calls the value that comes from there, "" if nothing."""
        one = self._defined.get(name)
        return "" if one is None else one[4] or ""


def complaint(error: BaseException, file: Path) -> tuple[str, Place | None]:
    """What Triton's compiler says, and where: of functions that call each other the innermost one's
    error, and the innermost line of the file."""
    from triton.compiler.errors import CompilationError

    said, place = str(error), None
    whole = file.read_text("utf-8")
    cause: BaseException | None = error
    while isinstance(cause, CompilationError):
        node: Any = cause.node
        # Its lines are counted from the `def`.
        at = whole.find(cause.src) if cause.src else -1
        if cause.src and at >= 0 and hasattr(node, "lineno"):
            place = Place(str(file), whole.count("\n", 0, at) + node.lineno)
        said = cause.error_message or said
        cause = cause.__cause__
    return said, place
