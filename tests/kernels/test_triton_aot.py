"""Every Triton kernel, compiled for GPUs that are not here: which instructions came of it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from lowbit.kernels.triton import fast  # noqa: E402
from lowbit.kernels.triton.ahead import Compiled, compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402
from lowbit.kernels.triton.registry import teaching_kernels  # noqa: E402
from lowbit_lab.languages.triton import TritonKernel  # noqa: E402
from lowbit_lab.run.bind import TensorArgument, bind  # noqa: E402

GPUS = [80, 90]
TYPES = ["fp32", "bf16"]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def rows_arguments(
    kernel: Any, type_: str, length: int, chunk: int, rows: int, pieces: int = 1
) -> dict[str, Any]:
    """Arguments of a kernel of rows: `*_ptr` of data in `type_`, sums and what is kept float32."""
    parts = -(-length // chunk)
    made: dict[str, Any] = {name: f"*{type_}" for name in kernel.arg_names if "_ptr" in name}
    for name in ("sums_ptr", "mean_ptr", "rstd_ptr"):
        made[name] = "*fp32"
    made |= {"words_ptr": "*i64", "length": "i32", "rows": "i32:1", "eps": "fp32"}
    made |= {name: "i32" for name in kernel.arg_names if name.endswith("_stride")}
    made |= {"CENTRED": True, "WEIGHTED": True, "BIASED": True, "span": "i32"}
    made |= {"ROWS": rows, "CHUNK": chunk, "PARTS": parts}
    made |= {"PIECES": pieces, "HELD": pieces > 1 and type_ != "fp32", "ASM": True}
    made |= {
        "VEC": 1,
        "w_stride": "i32",
        "PARTS_BLOCK": triton.next_power_of_2(parts),
        "COLUMNS": chunk,
    }
    return {name: made[name] for name in kernel.arg_names}


def assert_wide_and_in_registers(made: Compiled, sm: int) -> None:
    """16 bytes to a load and to a store, and nothing in local memory."""
    assert made.local == 0
    assert made.count("LDL") == made.count("STL") == 0
    assert f".target sm_{sm}" in made.ptx
    assert made.wide_loads > 0


@pytest.mark.pairs
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("shape", [(4096, 4096, 1), (512, 512, 4), (131072, 16384, 1)])
@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_softmax(name: str, shape: tuple[int, int, int], type_: str, sm: int) -> None:
    from lowbit.kernels.triton.fast import softmax

    kernel = getattr(softmax, f"{name}_kernel")
    length, chunk, rows = shape
    arguments = rows_arguments(kernel, type_, length, chunk, rows)
    made = compile_ahead(kernel, arguments, sm, num_warps=max(4, min(16, chunk * rows // 512)))
    assert_wide_and_in_registers(made, sm)
    assert made.count("STG.E.128") > 0
    # The parts of a row meet through atomics; whole rows need none.
    assert (made.count("ATOMG") + made.count("ATOM") > 0) == (length > chunk)


@pytest.mark.pairs
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("shape", [(4096, 4096, 1), (131072, 4096, 1)])
@pytest.mark.parametrize("name", ["norm", "norm_backward"])
def test_norm(name: str, shape: tuple[int, int, int], type_: str, sm: int) -> None:
    from lowbit.kernels.triton.fast import norm

    kernel = getattr(norm, f"{name}_kernel")
    length, chunk, rows = shape
    arguments = rows_arguments(kernel, type_, length, chunk, rows)
    made = compile_ahead(kernel, arguments, sm, num_warps=8)
    assert_wide_and_in_registers(made, sm)
    assert made.count("STG.E.128") > 0


@pytest.mark.deep("softmax-shape1-bf16-90")
@pytest.mark.pairs
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("shape", [(4097, 4096), (50257, 8192)])
@pytest.mark.parametrize("name", ["softmax", "norm"])
def test_rows_that_begin_at_no_multiple_of_16_bytes(
    name: str, shape: tuple[int, int], type_: str, sm: int
) -> None:
    from lowbit.kernels.triton.fast import norm, softmax

    kernel = getattr({"softmax": softmax, "norm": norm}[name], f"{name}_kernel")
    arguments = rows_arguments(kernel, type_, *shape, 1)
    arguments |= {"VEC": 4 if type_ == "fp32" else 8, "length": "i32:1", "x_stride": "i32:1"}
    made = compile_ahead(kernel, arguments, sm, num_warps=8)
    assert_wide_and_in_registers(made, sm)
    assert made.count("STG.E.128") > 0


def _tables() -> list[Any]:
    from lowbit.kernels.triton.fast import norm, softmax

    rms, layer = {"CENTRED": False, "BIASED": False}, {"CENTRED": True, "BIASED": True}
    served = [
        (softmax.softmax_kernel, softmax.FORWARD, {}, 0),
        (softmax.softmax_kernel, softmax.FORWARD, {}, 1),
        (norm.norm_kernel, norm.RMS_ALIGNED, rms, 0),
        (norm.norm_kernel, norm.FORWARD, rms, 1),
        (norm.norm_kernel, norm.FORWARD, layer, 0),
        (norm.norm_kernel, norm.FORWARD, layer, 1),
    ]
    # Of several lengths with one configuration, the first.
    alike = {
        (kernel, sm, size, str(config), str(flags), less): pytest.param(
            kernel, sm, "fp32" if size == 4 else "bf16", longest - less, config, flags
        )
        for kernel, table, flags, less in served
        for (sm, size), entries in table.items()
        for longest, config in entries
    }
    return list(alike.values())


@pytest.mark.drawn(14)
@pytest.mark.deep("*-2097151-*", "*-config38-*", "*-config66-*")
@pytest.mark.pairs
@pytest.mark.parametrize(("kernel", "sm", "type_", "length", "config", "flags"), _tables())
def test_what_the_tables_say(
    kernel: Any, sm: int, type_: str, length: int, config: Any, flags: dict[str, bool]
) -> None:
    given = rows_arguments(kernel, type_, length, config.chunk, config.rows, config.pieces)
    given |= {"rows": "i32"} | flags
    if length % 16:
        given |= {"length": "i32:1", "x_stride": "i32:1"}
    made = compile_ahead(kernel, given, sm, **config.options)
    assert made.local == 0
    assert made.wide_loads > 0 or length % 16
    if given["HELD"] and length % 16 == 0 and not flags.get("CENTRED"):
        # Two elements to a register, and as many more for everything else.
        held = config.rows * config.chunk // (config.num_warps * 32) // 2
        assert made.registers < 2 * held + 32


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("type_", TYPES)
def test_sums(type_: str, sm: int) -> None:
    from lowbit.kernels.triton.fast.norm import (
        column_sum_kernel,
        norm_weight_kernel,
        shifts_kernel,
    )
    from lowbit.kernels.triton.fast.row_sum import row_sum_kernel

    arguments = rows_arguments(row_sum_kernel, type_, 4096, 4096, 1)
    assert_wide_and_in_registers(compile_ahead(row_sum_kernel, arguments, sm, num_warps=8), sm)
    arguments = rows_arguments(norm_weight_kernel, type_, 4096, 128, 16)
    assert_wide_and_in_registers(compile_ahead(norm_weight_kernel, arguments, sm), sm)
    arguments = rows_arguments(column_sum_kernel, "fp32", 4096, 128, 16)
    made = compile_ahead(column_sum_kernel, {**arguments, "z_ptr": f"*{type_}"}, sm)
    assert_wide_and_in_registers(made, sm)
    pointers = {"x_ptr": f"*{type_}", "z_ptr": f"*{type_}"}
    sizes = {"length": "i32", "z_stride": "i32", "COLUMNS": 4096}
    made = compile_ahead(shifts_kernel, pointers | sizes, sm)
    assert made.local == 0
    assert made.count("STG.E.128") > 0


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("last", "splits"), [(False, 1), (True, 1), (True, 4)])
def test_conv2d(last: bool, splits: int, type_: str, sm: int) -> None:
    from lowbit.kernels.triton.fast import conv2d

    itemsize = 4 if type_ == "fp32" else 2
    config: Any = conv2d.conv_choice(Gpu(sm, 132), 128, itemsize).config
    kernel = conv2d.conv2d_kernel
    made: dict[str, Any] = dict.fromkeys(kernel.arg_names, "i32")
    made |= {name: f"*{type_}" for name in kernel.arg_names if name.endswith("_ptr")}
    tile = (config.pixels // 64, 8, 8, 1, config.depth)
    for name, block in (("x", tile), ("w", (config.channels, 1, config.depth))):
        kind = f"tensordesc<{type_}[{', '.join(map(str, block))}]>"
        made[name] = kind if sm == 90 else (f"*{type_}", *["i32"] * (len(block) - 1))
        made[f"{name}_sizes"] = ("i32",) * len(block)
    made |= {"z_sizes": ("i32",) * 4, "pitch": "i32:1", "TILE": tile, "CHANNELS": config.channels}
    # What Triton makes of a stride of 1: a constant.
    made["z_strides"] = ("i32", 1, "i32", "i32") if last else ("i32", "i32", "i32", 1)
    made |= {"KW": 3, "TAPS": 9, "STRIDE": (2, 2), "PAD": (1, 1), "DILATION": (1, 1)}
    made |= {"BIASED": True, "PRECISION": "ieee", "SPLITS": splits}
    made |= {"parts_ptr": "*fp32", "met_ptr": "*i32"}
    compiled = compile_ahead(kernel, made, sm, **config.options)
    assert compiled.local == 0
    if type_ != "fp32":
        assert compiled.count("HGMMA" if sm == 90 else "HMMA") > 0
    if last:
        assert compiled.wide_loads > 0
    assert compiled.count("STG.E.128") > 0


@pytest.mark.deep("quantized_matmul-90")
@pytest.mark.pairs
@pytest.mark.parametrize("sm", GPUS)
@pytest.mark.parametrize("name", list(teaching_kernels()))
def test_teaching_kernel(name: str, sm: int) -> None:
    teaching = teaching_kernels()[name]
    reading = TritonKernel.of(teaching.kernel)
    binding = bind(reading.parameters, teaching.operation, {}, None)
    operation = teaching.operation
    sizes = operation.complete(operation.exercise)
    types = {t.name: t.dtype for t in (*operation.inputs, operation.result)}
    short = {"float32": "fp32", "int32": "i32"}
    arguments: dict[str, Any] = {}
    for parameter, value in binding.arguments(sizes, {}).items():
        constant = next(p.constant for p in reading.parameters if p.name == parameter)
        if isinstance(value, TensorArgument):
            arguments[parameter] = f"*{short[types[value.name]]}"
        else:
            arguments[parameter] = value if constant else "i32"
    made = compile_ahead(teaching.kernel, arguments, sm)
    assert made.local == 0
    assert made.count("LDL") == made.count("STL") == 0


def test_no_fast_kernel_is_left_out() -> None:
    here = Path(__file__).parent
    tests = "".join(path.read_text("utf-8") for path in here.glob("test_*.py"))
    for found in pkgutil.iter_modules(fast.__path__):
        module = importlib.import_module(f"{fast.__name__}.{found.name}")
        own = (k for k, v in vars(module).items() if k.endswith("_kernel") and hasattr(v, "fn"))
        for name in own:
            kernel = name.removesuffix("_kernel")
            assert re.search(rf'\b{name}\b|"{kernel}"', tests), f"{name} is not compiled ahead"


def test_missing_argument_is_named() -> None:
    from lowbit.kernels.triton.fast.row_sum import row_sum_kernel

    with pytest.raises(ValueError, match="no argument for z_ptr, rows"):
        compile_ahead(row_sum_kernel, {"x_ptr": "*fp32"}, 90)


def test_machine_code_is_printed_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. The tool that prints it takes longer than the assembler."""
    from lowbit.kernels.triton import ahead
    from lowbit.kernels.triton.fast.norm import column_sum_kernel

    run, tools = subprocess.run, list[str]()

    def called(command: list[Any], **options: Any) -> Any:
        tools.append(Path(command[0]).name)
        return run(command, **options)

    monkeypatch.setattr(ahead, "subprocess", SimpleNamespace(run=called))
    arguments = rows_arguments(column_sum_kernel, "fp32", 4096, 128, 16)
    made = compile_ahead(column_sum_kernel, {**arguments, "z_ptr": "*fp32"}, 90)
    assert made.registers > 0
    assert tools == ["cuobjdump"]
    assert made.count("EXIT") > 0
    assert made.count("LDG") > 0
    assert tools == ["cuobjdump", "nvdisasm"]
