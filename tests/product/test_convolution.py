"""Convolutions of 8-bit images against their definition: exactly, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from convolution_sums import convolution_sums, transposed_convolution_sums
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit
from lowbit.isa import available, host, named
from lowbit.jit.memory import OutOfBoundsError
from lowbit.kernels.cpu.convolution.depthwise import depthwise
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.shifted import Shifted
from lowbit.kernels.cpu.rows.windows import Lowered, Windows
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.product.convolution import prepare_convolution, windows_of
from lowbit.product.convolve import _requested
from lowbit.product.dispatch import plan
from lowbit.product.geometry import MODES, Geometry, line_table
from lowbit.product.prepare import prepare
from lowbit.product.product import Convolution, Product
from lowbit.product.requests import convolved

CASES: dict[str, dict[str, Any]] = {
    "first layer": {"size": (19, 22), "channels": 3, "kernel": (7, 7), "stride": 2, "padding": 3},
    "whole lines": {"size": (9, 7), "channels": 64, "kernel": (3, 3), "padding": 1},
    "short lines": {"size": (7, 7), "channels": 128, "kernel": (3, 3), "padding": 1},
    "lines of 6": {"size": (5, 6), "channels": 64, "kernel": (2, 5), "padding": ((0, 1), (3, 2))},
    "lines within": {"size": (9, 8), "channels": 64, "kernel": (3, 3), "dilation": (1, 2)},
    "two lines": {"size": (6, 5), "channels": 128, "kernel": (3, 3), "stride": 2, "padding": 1},
    "lines of 13": {"size": (5, 13), "channels": 64, "kernel": (3, 3), "padding": 1},
    "long lines": {"size": (5, 43), "channels": 128, "kernel": (3, 4), "stride": (1, 2)},
    "far lines": {"size": (6, 18), "channels": 64, "kernel": (2, 3), "dilation": 2, "padding": 3},
    "a line and one": {"size": (8, 9), "channels": 65, "kernel": (3, 3), "dilation": (1, 2)},
    "a line less one": {"size": (7, 7), "channels": 63, "kernel": (3, 3), "padding": 1},
    "one channel": {"size": (11, 12), "channels": 1, "kernel": (5, 5), "padding": ((2, 1), (0, 2))},
    "row kernel": {"size": (6, 9), "channels": 5, "kernel": (1, 3), "padding": (0, 1)},
    "pixels": {"size": (7, 5), "channels": 24, "kernel": (1, 1)},
    "every other pixel": {"size": (7, 5), "channels": 64, "kernel": (1, 1), "stride": 2},
    "one dimension": {"size": (40,), "channels": 24, "kernel": (5,), "padding": 2, "dilation": 2},
    "three dimensions": {"size": (5, 6, 4), "channels": 5, "kernel": (3, 2, 3), "padding": 1},
    "reflect": {"size": (6, 7), "channels": 5, "kernel": (3, 3), "padding": 2, "mode": "reflect"},
    "edge": {"size": (6, 7), "channels": 64, "kernel": (3, 3), "padding": 1, "mode": "edge"},
    "wrap": {"size": (6, 7), "channels": 3, "kernel": (3, 5), "padding": 2, "mode": "wrap"},
    "larger than the image": {"size": (2, 2), "channels": 5, "kernel": (5, 5), "padding": 2},
    "groups": {"size": (6, 7), "channels": 20, "kernel": (3, 3), "padding": 1, "groups": 4},
    "depthwise": {"size": (9, 8), "channels": 72, "kernel": (3, 3), "padding": 1, "groups": 72},
    "depthwise of few": {"size": (7, 7), "channels": 5, "kernel": (5, 5), "groups": 5, "stride": 2},
    "depthwise, doubled": {
        "size": (6, 5),
        "channels": 40,
        "kernel": (3, 3),
        "groups": 40,
        "padding": 1,
        "outputs": 80,
    },
    "depthwise along one": {
        "size": (23,),
        "channels": 70,
        "kernel": (4,),
        "dilation": 5,
        "groups": 70,
        "padding": 6,
    },
    "depthwise in three": {
        "size": (4, 5, 6),
        "channels": 9,
        "kernel": (2, 3, 2),
        "stride": (1, 2, 2),
        "groups": 9,
        "padding": (0, 1, 2),
    },
    "depthwise that wraps": {
        "size": (5, 19),
        "channels": 33,
        "kernel": (6, 3),
        "mode": "wrap",
        "groups": 33,
        "padding": ((1, 3), (2, 0)),
    },
    "depthwise of every third": {
        "size": (7, 11),
        "channels": 66,
        "kernel": (3, 2),
        "stride": 3,
        "groups": 66,
        "padding": 1,
    },
    "depthwise of many taps": {
        "size": (1030,),
        "channels": 3,
        "kernel": (1025,),
        "groups": 3,
        "outputs": 3,
    },
    "groups of lines": {"size": (5, 5), "channels": 128, "kernel": (3, 3), "groups": 2},
}


def _pairs(given: Any, count: int) -> tuple[tuple[int, int], ...]:
    both = (given,) * count if isinstance(given, int) else given
    return tuple((p, p) if isinstance(p, int) else p for p in both)


def _each(given: Any, count: int) -> tuple[int, ...]:
    return (given,) * count if isinstance(given, int) else given


def _drawn(
    seed: int, size: tuple[int, ...], channels: int, kernel: tuple[int, ...], dtype: str,
    batch: int = 3, outputs: int = 20, groups: int = 1,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    rng = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max + 1, (batch, *size, channels)).astype(dtype)
    weight = rng.integers(-128, 128, (outputs, channels // groups, *kernel)).astype(np.int8)
    return x, weight


def _expected(x: np.ndarray, weight: np.ndarray, zero_point: int, case: dict[str, Any]) -> Any:
    count = weight.ndim - 2
    return convolution_sums(
        x.astype(np.int64) - zero_point, weight, _each(case.get("stride", 1), count),
        _pairs(case.get("padding", 0), count), _each(case.get("dilation", 1), count),
        case.get("groups", 1), case.get("mode", "constant"),
    )  # fmt: skip


def _arguments(case: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: case[name] for name in ("stride", "padding", "dilation") if name in case}
    return {**chosen, "padding_mode": case.get("mode", "constant")}


@pytest.mark.drawn(60)
@pytest.mark.deep(
    "short lines-uint8-0-avx2",
    "whole lines-uint8-0-avx2",
    "short lines-uint8-0-avx2_vnni",
    "whole lines-uint8-0-avx2_vnni",
)
@pytest.mark.pairs
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("dtype", "zero_point"), [("uint8", 0), ("uint8", 77), ("int8", -3)])
@pytest.mark.parametrize("name", CASES)
def test_exact_sums(name: str, dtype: str, zero_point: int, isa: str) -> None:
    case = CASES[name]
    sizes = case["size"], case["channels"], case["kernel"]
    groups = case.get("groups", 1)
    outputs = case.get("outputs", groups if groups > 4 else 20)
    x, weight = _drawn(1, *sizes, dtype, 3, outputs, groups)
    packed = lowbit.pack_convolution(weight, groups=case.get("groups", 1))
    result = lowbit.convolution(x, packed, zero_point=zero_point, isa=isa, **_arguments(case))
    np.testing.assert_array_equal(result, _expected(x, weight, zero_point, case))


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed(groups: int, isa: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 256, (2, 5, 6, 10)).astype(np.uint8)
    weight = rng.integers(-128, 128, (10, 7, 3, 2)).astype(np.int8)
    packed = lowbit.pack_convolution(weight, groups=groups, transposed=True)
    result = lowbit.convolution(
        x, packed, stride=(2, 3), padding=((1, 0), (0, 1)), dilation=(1, 2), output_padding=(1, 0),
        zero_point=9, isa=isa,
    )  # fmt: skip
    expected = transposed_convolution_sums(
        x.astype(np.int64) - 9, weight, (2, 3), ((1, 0), (0, 1)), (1, 2), groups, (1, 0)
    )
    np.testing.assert_array_equal(result, expected)


@pytest.mark.deep("*-avx2", "whole lines-*", "long lines-*", "*-avx2_vnni")
@pytest.mark.pairs
@pytest.mark.parametrize("isa", ["amx", "avx512_vnni", "avx2"])
@pytest.mark.parametrize("name", CASES)
def test_every_access_is_inside(name: str, isa: str) -> None:
    case = CASES[name]
    if "groups" in case:
        pytest.skip("groups are products of their own")
    x, weight = _drawn(3, case["size"], case["channels"], case["kernel"], "int8", batch=2)
    out = np.full(interpreted(x, weight, None, 5, case, isa), 0x55555555, np.int32)
    interpreted(x, weight, out, 5, case, isa)
    np.testing.assert_array_equal(out, _expected(x, weight, 5, case))


def asked_for(size: tuple[int, int], channels: int, kernel: int = 3, stride: int = 1) -> Product:
    """The product that a convolution with VNNI is."""
    weight = np.ones((32, channels, kernel, kernel), np.int8)
    (b,) = lowbit.pack_convolution(weight).matrices
    geometry = Geometry.of(size, (kernel, kernel), stride, kernel // 2)
    return convolved(
        Convolution(1, geometry, channels, 1, False, False, b.format, "avx512_vnni", 1)
    )


def test_strips_are_for_images_whose_windows_share_enough() -> None:
    assert isinstance(asked_for((9, 20), 64).a, Shifted)
    assert isinstance(asked_for((9, 20), 3).a, Lowered)
    assert isinstance(asked_for((9, 20), 3, stride=2).a, Lowered)
    for gathered in (
        asked_for((9, 20), 64, stride=2),  # nine taps, in four lines for each window
        asked_for((20, 4), 64),  # lines shorter than a step
        asked_for((60, 60), 3, kernel=2, stride=3),  # pixels between windows
        asked_for((3, 1 << 20), 64),  # a strip would be larger than the caches
    ):
        assert isinstance(gathered.a, Windows)
        assert gathered.image is None


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Caches in which an image's strip is several items, and a weight's panels too."""
    cached = prepare, prepare_convolution, _requested
    for one in cached:
        one.cache_clear()
    small = {"L1d": 1 << 12, "L2": 1 << 16, "L3": 1 << 20}
    monkeypatch.setattr(host, "caches", lambda: small)
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.deep(
    "channels-1-avx2",
    "channels-1-avx512",
    "channels-3-avx512",
    "channels-1-avx2_vnni",
    "channels-1-amx*",
    "channels-3-amx*",
)
@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["groups", "channels", "first layer"])
def test_items_of_images(name: str, threads: int, isa: str) -> None:
    """Several items for each image of a batch, and for the columns."""
    channels, groups, kernel, stride = {
        "groups": (128, 2, 3, 1), "channels": (64, 1, 3, 1), "first layer": (3, 1, 7, 2),
    }[name]  # fmt: skip
    case = {"stride": stride, "padding": kernel // 2, "groups": groups}
    x, weight = _drawn(7, (27, 33), channels, (kernel, kernel), "int8", 2, 160, groups)
    packed = lowbit.pack_convolution(weight, groups=groups)
    result = lowbit.convolution(x, packed, stride=stride, padding=kernel // 2, zero_point=9,
                                threads=threads, isa=isa)  # fmt: skip
    np.testing.assert_array_equal(result, _expected(x, weight, 9, case))


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize("size", [(7, 7), (9, 11)])
def test_panels_that_pass_by_once(size: tuple[int, int]) -> None:
    """Weights larger than the caches, of images whose lines are one."""
    case = {"size": size, "channels": 64, "kernel": (3, 3), "padding": 1}
    x, weight = _drawn(8, size, 64, (3, 3), "int8", 2, 70)
    stated = convolved(Convolution(
        2, Geometry.of(size, (3, 3), 1, 1), 64, 1, True, True,
        lowbit.pack_convolution(weight).matrices[0].format, "amx", 1,
    ))  # fmt: skip
    assert stated.image
    assert stated.image.gap == (size[1] + 1, size[1])
    shape = plan(stated).shape
    assert (shape.row_blocks, shape.ahead > 0) == ((4, True) if size == (7, 7) else (2, False))
    out = np.full((2, *size, 70), 0x55555555, np.int32)
    interpreted(x, weight, out, 5, case, "amx")
    np.testing.assert_array_equal(out, _expected(x, weight, 5, case))


def interpreted(
    x: np.ndarray, weight: np.ndarray, out: Any, zero_point: int, case: dict[str, Any], isa: str
) -> tuple[int, ...]:
    """Run the product's text on NumPy; without `out`, only say what shape it must have."""
    packed = lowbit.pack_convolution(weight)
    (b,) = packed.matrices
    geometry = Geometry.of(case["size"], case["kernel"], case.get("stride", 1),
                           case.get("padding", 0), case.get("dilation", 1),
                           case.get("mode", "constant"))  # fmt: skip
    channels = x.shape[-1]
    asked = Convolution(len(x), geometry, channels, 1, True, True, b.proven_format, isa, 1)
    if out is None:
        return asked.shape
    stated = convolved(asked)
    made = plan(stated)
    arguments = dict.fromkeys(product.types) | {
        "a": x.view(np.uint8), "a_row_stride": stated.a_strides[0], "a_stride": 1,
        "windows": windows_of(asked, stated), "first_row": 0,
        "packed": np.zeros(made.packed_bytes, np.uint8),
        "row_zero": np.array([zero_point + 128], np.int32), "panels": b.panels,
        "column_sum": b.column_sums, "residual_stride": 0, "out": out, "out_stride": stated.n,
        "m": stated.m, "n": stated.n, "k_size": stated.k, "block_rows": made.block_rows,
        "item_steps": made.item_steps, "item_panels": made.item_panels,
        "threads": 1, "next_bytes": 0,
        "private": np.zeros(made.private_bytes, np.uint8), "private_bytes": made.private_bytes,
    }  # fmt: skip
    product.interpret(
        named(isa), arguments, micro=made.micro, shape=made.shape, a_format=stated.a,
        epilogue=stated.epilogue, fused=made.fused,
    )  # fmt: skip
    return asked.shape


@pytest.mark.deep("depthwise that wraps-generic")
@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2", "generic"])
@pytest.mark.parametrize("name", [
    name for name, case in CASES.items()
    if name.startswith("depthwise") and math.prod(case["kernel"]) < 1025
])  # fmt: skip
def test_every_depthwise_access_is_inside(name: str, isa: str) -> None:
    case = CASES[name]
    outputs = case.get("outputs", case["groups"])
    x, weight = _drawn(4, case["size"], case["channels"], case["kernel"], "int8", 2, outputs,
                       case["groups"])  # fmt: skip
    (packed,) = lowbit.pack_convolution(weight, groups=case["groups"]).matrices
    names = ("stride", 1), ("padding", 0), ("dilation", 1), ("mode", "constant")
    given = (case.get(name, default) for name, default in names)
    geometry = Geometry.of(case["size"], case["kernel"], *given)
    out = np.full((len(x), *geometry.output, outputs), 0x55555555, np.int32)
    arguments = dict.fromkeys(depthwise.types) | {
        "x": x.view(np.uint8), "image_stride": x[0].size,
        "windows": line_table(geometry, x.shape[-1]), "weights": packed.panels,
        "row_zero": np.array([5 + 128], np.int32), "column_sum": packed.column_sums, "out": out,
        "m": len(x) * math.prod(geometry.output[:-1]), "n": outputs, "item_lines": 2,
        "multiplier": outputs // case["groups"],
    }  # fmt: skip
    depthwise.interpret(
        named(isa), arguments, format=Windows(True, True), window=geometry.window,
        repeated=outputs > case["groups"], epilogue=Epilogue(a_zero=True, uniform=True),
    )  # fmt: skip
    np.testing.assert_array_equal(out, _expected(x, weight, 5, case))


def test_a_table_that_leads_outside_is_caught() -> None:
    """The check of the check: with an image one pixel too small, some load must be refused."""
    case = CASES["whole lines"]
    x, weight = _drawn(3, case["size"], case["channels"], case["kernel"], "int8", batch=1)
    out = np.zeros(interpreted(x, weight, None, 0, case, "amx"), np.int32)
    with pytest.raises(OutOfBoundsError):
        interpreted(x[:, :-1], weight, out, 0, case, "amx")


@st.composite
def _convolutions(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    case = {
        "channels": groups * draw(st.sampled_from([1, 2, 3, 5, 21, 32, 63, 64, 65, 128])),
        "kernel": tuple(draw(st.integers(1, 4)) for _ in range(count)),
        "stride": tuple(draw(st.integers(1, 3)) for _ in range(count)),
        "dilation": tuple(draw(st.integers(1, 2)) for _ in range(count)),
        "padding": tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(count)),
        "mode": draw(st.sampled_from(MODES)),
        "groups": groups,
    }
    reach = [d * (k - 1) for k, d in zip(case["kernel"], case["dilation"], strict=True)]
    case["size"] = tuple(
        max(4, r + 1 - sum(p)) + draw(st.integers(0, 4))
        for r, p in zip(reach, case["padding"], strict=True)
    )
    return case


@pytest.mark.deep
@settings(max_examples=60, deadline=None)
@given(
    case=_convolutions(),
    dtype=st.sampled_from(["uint8", "int8"]),
    zero_point=st.integers(0, 127),
    outputs=st.integers(1, 40),
    isa=st.sampled_from(available()),
)
def test_any_convolution(
    case: dict[str, Any], dtype: str, zero_point: int, outputs: int, isa: str
) -> None:
    outputs *= case["groups"]
    x, weight = _drawn(outputs, case["size"], case["channels"], case["kernel"], dtype, 2, outputs,
                       case["groups"])  # fmt: skip
    packed = lowbit.pack_convolution(weight, groups=case["groups"])
    result = lowbit.convolution(x, packed, zero_point=zero_point, isa=isa, **_arguments(case))
    np.testing.assert_array_equal(result, _expected(x, weight, zero_point, case))


@pytest.mark.deep("int8-1-avx2", "int8-1-avx512", "int8-1-avx2_vnni", "int8-1-amx*")
@pytest.mark.pairs
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("groups", [1, 2, 24])
@pytest.mark.parametrize("out_dtype", ["float32", "int8"])
def test_what_follows_the_sums(out_dtype: Any, groups: int, isa: str) -> None:
    """Scales, bias, a residual of bytes, ReLU and requantization, each rounded once, to the bit."""
    rng = np.random.default_rng(6)
    x = rng.integers(0, 256, (2, 6, 7, 24)).astype(np.uint8)
    weight = lowbit.quantize(rng.standard_normal((48, 24 // groups, 3, 3)), axis=0)
    bias = rng.standard_normal(48).astype(np.float32)
    residual = rng.integers(0, 256, (2, 6, 7, 48)).astype(np.uint8)
    quantized: dict[str, Any] = {}
    if out_dtype == "int8":
        quantized = {"out_scale": 0.05, "out_zero_point": -4}
    out = np.zeros((2, 6, 9, 48), np.dtype(out_dtype))[:, :, 1:8]
    result = lowbit.convolution(
        x, lowbit.pack_convolution(weight, groups=groups), padding=1, zero_point=100, scale=0.02,
        bias=bias, residual=residual, out=out, isa=isa, out_dtype=out_dtype,
        post_ops=("bias", lowbit.QuantizedResidual(0.03, 7), "relu"), **quantized,
    )  # fmt: skip
    assert result is out
    sums = convolution_sums(
        x.astype(np.int64) - 100, weight.values, (1, 1), ((1, 1), (1, 1)), (1, 1), groups
    )
    factor = weight.scale * np.float32(0.02)
    y = sums.astype(np.float32).astype(np.float64) * factor + bias
    y = y.astype(np.float32)
    y = np.maximum(y + (residual.astype(np.float32) - np.float32(7)) * np.float32(0.03), 0)
    if quantized:
        y = np.clip(np.rint(y * (np.float32(1) / np.float32(0.05))) - 4, -128, 127)
    np.testing.assert_array_equal(out, y.astype(out_dtype))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_as_pytorch_does(transposed: bool, count: int) -> None:
    """In float64, which is exact for these integers."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    x = rng.integers(0, 256, (2, *(7, 6, 5)[:count], 12)).astype(np.uint8)
    weight = rng.integers(-128, 128, (12, 4, *(3, 2, 3)[:count])).astype(np.int8)
    given: dict[str, Any] = {
        "stride": 2,
        "padding": 1,
        **({"output_padding": 1} if transposed else {}),
    }
    packed = lowbit.pack_convolution(weight, groups=3, transposed=transposed)
    result = lowbit.convolution(x, packed, **given)
    name = f"conv{'_transpose' if transposed else ''}{count}d"
    operands = (torch.from_numpy(a.astype(np.float64)) for a in (np.moveaxis(x, -1, 1), weight))
    expected = getattr(torch.nn.functional, name)(*operands, groups=3, **given)
    np.testing.assert_array_equal(result, np.moveaxis(expected.numpy(), 1, -1))


@pytest.mark.deep
def test_long_images_are_served_in_chunks() -> None:
    """Rows that are packed before the products, more than a call takes, and several threads."""
    rng = np.random.default_rng(8)
    x = rng.integers(0, 256, (3, 30, 31, 512)).astype(np.uint8)
    weight = rng.integers(-128, 128, (300, 512, 3, 3)).astype(np.int8)
    packed = lowbit.pack_convolution(weight)
    result = lowbit.convolution(x, packed, padding=1, threads=2)
    case = {"stride": 1, "padding": 1}
    np.testing.assert_array_equal(result, _expected(x, weight, 0, case))


def test_nothing_to_compute() -> None:
    packed = lowbit.pack_convolution(np.ones((5, 4, 3, 3), np.int8))
    assert lowbit.convolution(np.ones((0, 8, 8, 4), np.uint8), packed).shape == (0, 6, 6, 5)
    assert lowbit.convolution(np.ones((2, 2, 8, 4), np.uint8), packed).shape == (2, 0, 6, 5)
