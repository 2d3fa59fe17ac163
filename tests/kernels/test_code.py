"""The code that LLVM makes of the kernels: looked at, for sets that this machine need not have."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import pytest
from tests.kernels.test_products import MICRO_KERNELS

from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, micro_kernels
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.digits import Quantized
from lowbit.kernels.cpu.shared.epilogue import Epilogue

# What must be in the innermost loop of each micro-kernel, and where its accumulators live; the
# registers of "generic" are a guess at what any machine has, so spilling there is no mistake.
INNERMOST = {
    "amx/amx": (r"tdpbusd", None),
    "vnni/avx512_vnni": (r"vpdpbusd", r"zmm"),
    "vnni/avx2_vnni": (r"vpdpbusd", r"ymm"),
    "narrow/avx512": (r"vpmaddubsw", r"zmm"),
    "narrow/avx2": (r"vpmaddubsw", r"ymm"),
    "widening/avx512": (r"vpmaddwd", r"zmm"),
    "widening/avx2": (r"vpmaddwd", r"ymm"),
    "widening/generic": (r"pmaddwd", None),
    "dot/neon_dotprod": (r"sdot", r"q"),
    "dot/neon_i8mm": (r"sudot", r"q"),
    "matrix/neon_i8mm": (r"usmmla", r"q"),
}
JUMP = r"(?:j\w+|b(?:\.\w+)?|cbn?z \w+,|tbn?z \w+, #\d+,) (\.\w+)$"  # x86's, then AArch64's
STACK = r"\(%rsp|\[sp"


def _needs_llvm_for(micro: MicroKernel) -> None:
    """Skip where LLVM generates no code for the kernel's architecture; "generic" is x86 here."""
    wanted = micro.isa.architecture
    llvm.initialize_all_targets()
    native = llvm.get_process_triple()
    if wanted is None and not native.startswith("x86_64"):
        pytest.skip(f"what generic code is on {native} is not written down here")
    try:
        llvm.Target.from_triple(f"{wanted or 'x86_64'}-unknown-linux-gnu")
    except RuntimeError as error:
        pytest.skip(f"LLVM here generates no code for {wanted}: {error}")


def _assembly(micro: MicroKernel, m: int, n: int = 96, prefetch_output: bool = False) -> str:
    _needs_llvm_for(micro)
    return _assembly_of(micro, micro.shape(KernelQuery(m, n, 256))[0], prefetch_output)


@cache  # several numbers of rows and columns have one shape
def _assembly_of(micro: MicroKernel, shape: Any, prefetch_output: bool) -> str:
    return product.assembly(
        micro.isa,
        micro=micro,
        shape=shape,
        a_format=Quantized(),
        epilogue=Epilogue(
            a_zero=True, post_ops=("bias",), out="f32", prefetch_output=prefetch_output
        ),
    )


def _innermost_loop(assembly: str, instruction: str) -> list[str]:
    """Of the loops that hold uses, but no other loop that does, the one that holds most: its lines,
    from the label to before the jump back to it."""
    lines = [" ".join(re.split(r"(?<!,)\s#|//", line)[0].split()) for line in assembly.splitlines()]
    loops: list[tuple[int, int]] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        if line.endswith(":"):
            labels[line[:-1]] = number
        jump = re.match(JUMP, line)
        if jump and jump[1] in labels:
            loops.append((labels[jump[1]], number))
    uses = [number for number, line in enumerate(lines) if instruction in line]
    held = {loop: sum(loop[0] < use < loop[1] for use in uses) for loop in loops}
    used = [loop for loop in loops if held[loop]]
    inner = [
        one
        for one in used
        if not any(one != two and one[0] <= two[0] and two[1] <= one[1] for two in used)
    ]
    first, last = max(inner, key=held.__getitem__, default=(0, 0))
    return lines[first:last]


@pytest.mark.drawn(33)
@MICRO_KERNELS
@pytest.mark.parametrize(("m", "n"), [(1, 96), (4, 96), (17, 64), (64, 96), (72, 32), (72, 16)])
def test_the_innermost_loop_spills_nothing(micro: MicroKernel, m: int, n: int) -> None:
    if micro.name == "amx" and n < 32:
        pytest.skip("rows are finished within the loop of such a step, so it is not innermost")
    instruction, register = INNERMOST[repr(micro)]
    loop = _innermost_loop(_assembly(micro, m, n), instruction)
    assert loop, f"no loop with {instruction}"
    if register is not None:
        spilled = [line for line in loop if register in line and re.search(STACK, line)]
        assert not spilled


def test_shapes_use_all_accumulators() -> None:
    """64 rows: 8 by 3 registers for VNNI, 2 by 2 tiles for AMX, 4 by 4 registers for NEON."""
    by_name = {repr(micro): micro for micro in micro_kernels()}
    vnni = _innermost_loop(_assembly(by_name["vnni/avx512_vnni"], 64), "vpdpbusd")
    assert len({line.split(",")[-1] for line in vnni if "vpdpbusd" in line}) == 24
    amx = _assembly(by_name["amx/amx"], 64).splitlines()
    assert len({line.split(",")[-1] for line in amx if "tdpbusd" in line}) == 4
    # Four for a whole step, three for one with a single panel; of the first 64 k and of others.
    assert sum("tileload" in line for line in amx) == 14
    for name, instruction in (("dot/neon_dotprod", "sdot"), ("matrix/neon_i8mm", "usmmla")):
        loop = _innermost_loop(_assembly(by_name[name], 64), instruction)
        products = [line for line in loop if line.startswith(instruction)]
        assert len({line.split()[1] for line in products}) == 16
        assert not any(re.match(r"(mov|dup) v\d+\.(16b|4s)", line) for line in loop)


@pytest.mark.deep("widening/avx512", "widening/amx*")
@MICRO_KERNELS
def test_lines_that_the_next_step_writes_are_claimed(micro: MicroKernel) -> None:
    """One for each 64 bytes that a step stores, of one panel and of as many as it can have."""
    if micro.isa.architecture == "aarch64":
        pytest.skip("there it is another instruction, which nothing asks for")
    assert "prefetchw" not in _assembly(micro, 64)
    prefetched = sum(
        "prefetchw" in line for line in _assembly(micro, 64, prefetch_output=True).splitlines()
    )
    shape = micro.shape(KernelQuery(64, 96, 256))[0]
    lines = shape.panels + 1 if shape.panels > 1 else 1
    if shape.rows:
        assert prefetched == shape.rows * lines
    else:  # tiles are finished row by row, in several loops
        assert prefetched >= lines
