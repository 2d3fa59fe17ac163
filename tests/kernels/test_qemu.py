"""AArch64 kernels, compiled here and run by qemu's emulation of a CPU that has every extension.

A small driver in C, linked with one kernel, reads the kernel's arguments from a file and writes its
buffers back. Buffers end at a page that may not be touched.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit.api import pack
from lowbit.isa import neon
from lowbit.isa.instruction import Instruction, Signature
from lowbit.isa.types import Pointer, Type, Vector, s8, s64
from lowbit.jit import compile as compiler
from lowbit.jit.area import FIRST_REGION, area
from lowbit.jit.emit import emit
from lowbit.jit.interpret import Interpreter
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, Shape, micro_kernels
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.digits import Quantized
from lowbit.kernels.cpu.rows.input_format import Bytes
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import PANEL, blocks, padded_k
from lowbit.numerics import quantize
from lowbit.spec.operations.products import matmul
from lowbit.weights.panels import PackedMatrix

QEMU, COMPILER = "qemu-aarch64", "aarch64-linux-gnu-gcc"
pytestmark = pytest.mark.skipif(
    not (shutil.which(QEMU) and shutil.which(COMPILER)),
    reason=f"needs {QEMU} and {COMPILER}; on Debian and Ubuntu: "
    "apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
)
SETS = (neon.NEON_DOTPROD, neon.NEON_I8MM)
MICRO_KERNELS = pytest.mark.parametrize(
    "micro", [m for m in micro_kernels() if m.isa in SETS], ids=repr
)
INSTRUCTIONS = [
    pytest.param(value, isa, id=f"{value.name}-{isa.name}")
    for value in vars(neon).values()
    for isa in SETS
    if isinstance(value, Instruction) and value.feature in isa.features
]

# The input: threads, slots, words that threads share, the first region's number; those words (see
# jit.area); for each slot a size and a value, where a size of -1 marks an integer and any other a
# buffer, whose bytes follow.
DRIVER = r"""
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 1 << 16 };

void kernel(int64_t *slots, int64_t *area, int64_t thread, int64_t region);
static int64_t *slots, *area, region;

static void take(void *to, size_t size, FILE *in) {
    if (size && fread(to, size, 1, in) != 1) { fputs("input is cut short\n", stderr); exit(2); }
}

static int64_t word(FILE *in) { int64_t value; take(&value, sizeof value, in); return value; }

static char *guarded(size_t size) {
    size_t inside = (size + PAGE - 1) / PAGE * PAGE;
    char *start = mmap(0, inside + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) { perror("mmap"); exit(2); }
    if (inside && mprotect(start + PAGE, inside, PROT_READ | PROT_WRITE)) {
        perror("mprotect");
        exit(2);
    }
    return start + PAGE + inside - size;
}

static void *enter(void *thread) { kernel(slots, area, (int64_t)thread, region); return 0; }

int main(int argc, char **argv) {
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    if (!in || !out) { perror("fopen"); return 2; }
    int64_t threads = word(in), count = word(in), shared = word(in), *sizes = calloc(count, 8);
    region = word(in);
    slots = calloc(count, 8);
    area = calloc(shared, 8);
    for (int64_t i = 0; i < shared; i++) area[i] = word(in);
    for (int64_t i = 0; i < count; i++) {
        sizes[i] = word(in);
        slots[i] = word(in);
        if (sizes[i] < 0) continue;
        char *memory = guarded(sizes[i]);
        take(memory, sizes[i], in);
        slots[i] = (int64_t)memory;
    }
    pthread_t others[16];
    for (int64_t i = 1; i < threads; i++)
        if (pthread_create(&others[i], 0, enter, (void *)i)) { perror("pthread_create"); return 2; }
    enter(0);
    for (int64_t i = 1; i < threads; i++) pthread_join(others[i], 0);
    for (int64_t i = 0; i < count; i++)
        if (sizes[i] > 0) fwrite((void *)slots[i], sizes[i], 1, out);
    return fclose(out) != 0;
}
"""


class Emulator:
    """Links objects with the driver and runs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs: dict[bytes, Path] = {}
        self._driver = folder / "driver.o"
        source = folder / "driver.c"
        source.write_text(DRIVER)
        self._tool(COMPILER, "-O1", "-Wall", "-Werror", "-c", source, "-o", self._driver)

    @staticmethod
    def _tool(*command: object) -> None:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stderr}"

    def run(self, code: bytes, arguments: Sequence[int | np.ndarray], threads: int = 1) -> None:
        """Call `kernel` of an object file; arrays, which must be contiguous, are updated."""
        program = self._programs.get(code)
        if program is None:
            number = len(self._programs)
            object_file = self._folder / f"kernel{number}.o"
            object_file.write_bytes(code)
            program = self._folder / f"program{number}"
            self._tool(COMPILER, "-static", self._driver, object_file, "-pthread", "-o", program)
            self._programs[code] = program
        shared = area(0, threads)
        head = threads, len(arguments), len(shared), FIRST_REGION, *shared
        data = [struct.pack(f"{len(head)}q", *head)]
        arrays = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous
                data += [struct.pack("2q", argument.nbytes, 0), argument.tobytes()]
                arrays.append(argument)
            else:
                data.append(struct.pack("2q", -1, argument))
        given, returned = self._folder / "in", self._folder / "out"
        given.write_bytes(b"".join(data))
        self._tool(QEMU, "-cpu", "max", program, given, returned)
        result, start = returned.read_bytes(), 0
        for array in arrays:
            part = np.frombuffer(result[start : start + array.nbytes], array.dtype)
            if array.flags.writeable:
                array[...] = part.reshape(array.shape)
            else:
                assert (part.reshape(array.shape) == array).all()
            start += array.nbytes
        assert start == len(result)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("aarch64"))


def _arguments(
    micro: MicroKernel, a: np.ndarray, b: PackedMatrix, out: np.ndarray, bias: np.ndarray
) -> dict[str, Any]:
    """The product's arguments for contiguous operands, in items small enough for several."""
    m, k = a.shape
    shape, block_rows = micro.shape(KernelQuery(m, PANEL, k))
    step_rows = block_rows * shape.row_blocks
    nothing = np.zeros(0, np.float32)
    arguments = {
        "a": a,
        "a_row_stride": k,
        "a_stride": 1,
        "windows": nothing,
        "first_row": 0,
        "residual_stride": b.N,
        "packed": np.zeros((blocks(m, step_rows) * step_rows, padded_k(k)), np.uint8),
        "row_scale": np.zeros(m, np.float32),
        "row_zero": np.zeros(m, np.int32),
        "row_sum": np.zeros(m, np.int32),
        "panels": b.panels,
        "column_sum": b.column_sums,
        "column_zero": nothing if b.zero_points is None else b.zero_points,
        "column_scale": nothing if b.scale is None else b.scale,
        "bias": bias,
        "residual": nothing,
        "parameters": nothing,
        "out": out,
        "out_stride": out.shape[1],
        "m": m,
        "n": b.N,
        "k_size": k,
        "block_rows": block_rows,
        "item_steps": 2,
        "item_panels": 3,
        "threads": 1,
        "private": np.zeros(0, np.uint8),
        "private_bytes": 0,
        "next_panels": nothing,
        "next_bytes": 0,
    }
    return {name: arguments[name] for name in product.types}


def _shape(micro: MicroKernel, m: int, k: int) -> Shape:
    return micro.shape(KernelQuery(m, PANEL, k))[0]


def _code(micro: MicroKernel, m: int, k: int, **static: Any) -> bytes:
    """The object file of the product for M rows, its function called `kernel`."""
    isa = micro.isa
    types = list(product.types.values())
    module = emit(
        product.text,
        types,
        isa,
        "kernel",
        micro=micro,
        shape=_shape(micro, m, k),
        **static,
    )
    return compiler.object_code(str(module), isa)


@MICRO_KERNELS
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 65), (5, 17, 64), (35, 50, 15), (67, 40, 200)])
def test_integer_product(
    emulator: Emulator, micro: MicroKernel, sizes: tuple[int, int, int]
) -> None:
    named = dict(zip("MNK", sizes, strict=True))
    code = _code(micro, sizes[0], sizes[2], a_format=Bytes(), epilogue=Epilogue())
    for fill, threads in (("normal", 1), ("normal", 3), ("max*min", 1), ("min*min", 1)):
        case = matmul.case(named, dtypes="u8:s8:s32", fill=fill)
        inputs = case.inputs(seed=2)
        out = np.full(sizes[:2], 0x55555555, np.int32)
        nothing = np.zeros(0, np.float32)
        arguments = _arguments(micro, inputs["a"], pack(inputs["b"]), out, nothing)
        emulator.run(code, list(arguments.values()), threads)
        verdict = case.expect(inputs).check(out)
        assert verdict.ok, verdict.message


@MICRO_KERNELS
def test_quantized_product(emulator: Emulator, micro: MicroKernel) -> None:
    """From float32 rows, zero points on both sides and a bias: the same bits as interpreted."""
    rng = np.random.default_rng(4)
    m, n, k = 9, 21, 70
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[1], x[2, 5], x[3, -1], x[4] = 0, np.nan, -np.inf, np.abs(x[4])
    weight = pack(quantize(rng.standard_normal((k, n)) + 0.5, "uint8", axis=1, symmetric=False))
    bias = rng.standard_normal(32).astype(np.float32)
    static = {
        "a_format": Quantized(),
        "epilogue": Epilogue(a_zero=True, b_zero=True, post_ops=("bias",), out="f32"),
    }
    emulated, interpreted = (np.full((m, n), 7, np.float32) for _ in range(2))
    arguments = _arguments(micro, x, weight, emulated, bias)
    emulator.run(_code(micro, m, k, **static), list(arguments.values()))
    product.interpret(
        micro.isa,
        _arguments(micro, x, weight, interpreted, bias),
        micro=micro,
        shape=_shape(micro, m, k),
        **static,
    )
    assert np.isfinite(interpreted[[0, 1, 4]]).all()
    np.testing.assert_array_equal(emulated, interpreted)


def _full_range(rng: np.random.Generator, vector: Vector, count: int) -> np.ndarray:
    """Random values of a vector's whole type; the first ones are its extremes, and zero."""
    limits = np.iinfo(vector.element.numpy)
    values = rng.integers(limits.min, int(limits.max) + 1, (count, vector.lanes))
    for number, extreme in enumerate((limits.min, limits.max, 0)):
        values[number] = extreme
    return values.astype(vector.element.numpy)


@pytest.mark.parametrize(("instruction", "isa"), INSTRUCTIONS)
def test_emission_and_meaning_agree(emulator: Emulator, instruction: Instruction, isa: Any) -> None:
    signature, count = instruction.typing, 400
    assert isinstance(signature, Signature)
    vectors = [v for v in (*signature.operands, signature.result) if isinstance(v, Vector)]

    def text(k: Any, *arguments: Any) -> None:
        for i in k.range(0, arguments[-1]):
            places = [p + i * v.lanes for p, v in zip(arguments, vectors, strict=False)]
            values = [p.load(v.lanes) for p, v in zip(places[:-1], vectors, strict=False)]
            places[-1].store(instruction(*values))

    types: dict[str, Type] = {f"p{i}": Pointer(v.element) for i, v in enumerate(vectors)}
    types["count"] = s64
    rng = np.random.default_rng(6)
    data = [_full_range(rng, vector, count) for vector in vectors]
    emulated, interpreted = ([*(array.copy() for array in data), count] for _ in range(2))
    code = compiler.object_code(str(emit(text, list(types.values()), isa, "kernel")), isa)
    emulator.run(code, emulated)
    machine, arrays = Interpreter(isa), zip(types, interpreted[:-1], vectors, strict=False)
    pointers = [machine.pointer(name, one, vector.element) for name, one, vector in arrays]
    text(machine, *pointers, machine.constant(count, s64))
    for ours, meant in zip(emulated, interpreted, strict=True):
        np.testing.assert_array_equal(ours, meant)


def test_the_driver_sees_a_store_past_the_end(emulator: Emulator) -> None:
    def text(k: Any, p: Any) -> None:
        p.store(k.zeros(s8, 16))

    isa = neon.NEON_DOTPROD
    code = compiler.object_code(str(emit(text, [Pointer(s8)], isa, "kernel")), isa)
    emulator.run(code, [np.ones(16, np.int8)])
    with pytest.raises(AssertionError, match="exit status"):
        emulator.run(code, [np.ones(15, np.int8)])
