"""Winograd's algorithm in whole numbers: the same bits as products of bytes, on each set."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from convolution_sums import convolution_sums
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit
from lowbit.isa import available, host, named
from lowbit.kernels.cpu.convolution import winograd_tiles
from lowbit.kernels.cpu.convolution.winograd import winograd
from lowbit.kernels.cpu.convolution.winograd_tiles import MOST_SUM, weight_words
from lowbit.kernels.cpu.rows.windows import Windows
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.product.convolution import prepare_convolution, with_weight
from lowbit.product.convolve import _requested
from lowbit.product.geometry import Geometry
from lowbit.product.product import Convolution

SETS = tuple(name for name in available() if winograd_tiles.may_serve(named(name)))


def drawn(
    seed: int, shape: tuple[int, ...], outputs: int, dtype: str = "uint8"
) -> tuple[np.ndarray, np.ndarray]:
    """Images and a weight, over the full range."""
    rng, limits = np.random.default_rng(seed), np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return x, rng.integers(-128, 128, (outputs, shape[-1], 3, 3)).astype(np.int8)


def expected(x: np.ndarray, weight: np.ndarray, zero: int, padding: Any) -> np.ndarray:
    ones = 1, 1
    return convolution_sums(x.astype(np.int64) - zero, weight, ones, padding, ones, 1)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel serves whatever it can, faster or not."""
    forget()
    monkeypatch.setattr(winograd_tiles, "_direct", lambda isa, query: 1 << 60)
    yield
    forget()


def forget() -> None:
    for cached in (prepare_convolution, _requested, winograd_tiles.refuses):
        cached.cache_clear()


def serves(x: np.ndarray, packed: lowbit.PackedConvolution, isa: str | None) -> bool:
    """Whether this kernel serves a window's convolution with one pixel around."""
    geometry = Geometry.of(x.shape[1:3], (3, 3), 1, 1)
    asked = Convolution(len(x), geometry, x.shape[-1], 1, False, False, packed.matrices[0].format,
                        isa or SETS[0], 1, bounded=packed.bounded)  # fmt: skip
    return prepare_convolution(asked).launches[0].program.name == "winograd"


@pytest.mark.drawn(12)
@pytest.mark.pairs
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", 0), ("uint8", 77), ("int8", -128)])
@pytest.mark.parametrize(
    ("shape", "outputs", "padding"),
    [
        ((1, 8, 8, 32), 16, ((1, 1), (1, 1))),  # whole tiles
        ((2, 9, 6, 64), 70, ((1, 1), (1, 1))),  # ends of lines, of images, of panels
        ((1, 3, 3, 96), 1, ((0, 0), (0, 0))),  # one pixel
        ((2, 7, 5, 48), 20, ((1, 1), (1, 1))),  # channels that fill no vector
        ((1, 10, 6, 8), 9, ((1, 1), (1, 1))),
        ((3, 4, 23, 32), 33, ((2, 0), (0, 3))),  # another image on each side
        ((1, 1, 1, 64), 80, ((4, 5), (6, 4))),  # more of what lies outside than of the image
        ((1, 30, 41, 64), 130, ((1, 1), (1, 1))),  # several items
    ],
)
def test_exact_sums(
    shape: tuple[int, ...], outputs: int, padding: Any, dtype: str, zero: int, threads: int,
    isa: str,
) -> None:  # fmt: skip
    x, weight = drawn(1, shape, outputs, dtype)
    packed = lowbit.pack_convolution(weight)
    given = {"padding": padding, "zero_point": zero, "isa": isa}
    made = lowbit.convolution(x, packed, threads=threads, **given)
    assert _requested.cache_info().currsize == 1
    np.testing.assert_array_equal(made, expected(x, weight, zero, padding))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_sums(value: int, isa: str) -> None:
    """As large as bytes make them with so many channels; they wrap on the way."""
    x = np.full((1, 9, 9, 96), 255, np.uint8)
    weight = np.full((17, 96, 3, 3), value, np.int8)
    packed = lowbit.pack_convolution(weight)
    assert serves(x, packed, isa)
    made = lowbit.convolution(x, packed, padding=1, isa=isa)
    np.testing.assert_array_equal(made, expected(x, weight, 0, ((1, 1), (1, 1))))


@pytest.mark.parametrize("outputs", [3, 20])
def test_sums_are_bounded_by_the_weights(outputs: int) -> None:
    """By the positive or the negative ones of each output, whichever are more."""
    rng = np.random.default_rng(outputs)
    for most in (126, 127, 128):
        weight = rng.integers(-most, most, (outputs, 512, 3, 3)).astype(np.int8)
        weight[-1, :80] = 127
        for zeros in range(0, 512, 48):
            weight[:, :zeros] = 0
            values = weight.reshape(outputs, -1).astype(np.int64)
            sums = max((values * (values > 0)).sum(1).max(), -(values * (values < 0)).sum(1).min())
            bounded = lowbit.pack_convolution(weight).bounded
            assert bounded == (255 * sums < MOST_SUM)


@pytest.mark.usefixtures("always")
def test_unbounded_sums_are_made_of_bytes(caplog: pytest.LogCaptureFixture) -> None:
    x = np.full((1, 9, 9, 128), 255, np.uint8)
    weight = np.full((17, 128, 3, 3), 127, np.int8)
    packed = lowbit.pack_convolution(weight)
    with caplog.at_level(logging.INFO, "lowbit"):
        assert not serves(x, packed, SETS[0])
    assert "sums could reach 33,554,432" in caplog.text
    for isa in SETS:
        made = lowbit.convolution(x, packed, padding=1, isa=isa)
        np.testing.assert_array_equal(made, expected(x, weight, 0, ((1, 1), (1, 1))))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("most", "bounded"), [(3, True), (127, False)])
def test_a_network_knows_whether_sums_are_bounded(most: int, bounded: bool) -> None:
    packed = lowbit.pack_convolution(np.full((17, 128, 3, 3), most, np.int8))
    asked = Convolution(1, Geometry.of((9, 9), (3, 3), 1, 1), 128, 1, False, False,
                        packed.matrices[0].format, SETS[0], 1)  # fmt: skip
    assert with_weight(asked, packed).bounded is bounded


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "uint8", "int8"])
@pytest.mark.parametrize("beside", ["", "float32", "uint8"])
def test_what_follows_has_the_bits_of_products(
    beside: str, out_dtype: Any, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(-128, 128, (2, 11, 9, 64)).astype(np.int8)
    weight = lowbit.quantize(rng.standard_normal((40, 64, 3, 3)), axis=0)
    quantized = {"out_scale": 0.7, "out_zero_point": 3} if "int8" in out_dtype else {}
    residual = rng.integers(0, 200, (2, 11, 9, 40)).astype(beside) if beside else None
    added: dict[str, tuple[Any, ...]] = {
        "": (), "float32": ("residual",), "uint8": (lowbit.QuantizedResidual(0.4, 9),),
    }  # fmt: skip
    packed = lowbit.pack_convolution(weight)

    def run() -> np.ndarray:
        forget()
        return lowbit.convolution(
            x, packed, padding=1, zero_point=-7, scale=0.05, bias=rng.standard_normal(40),
            residual=residual, post_ops=("bias", *added[beside], "relu"), out_dtype=out_dtype,
            isa=isa, **quantized,
        )  # fmt: skip

    state = rng.bit_generator.state
    made = run()
    rng.bit_generator.state = state
    monkeypatch.setattr(winograd_tiles, "may_serve", lambda isa: False)
    np.testing.assert_array_equal(made, run())


@pytest.mark.deep("size1-16-5-70-True-avx2", "size1-16-5-70-True-avx2_vnni")
@pytest.mark.parametrize("isa", ["avx512_vnni", "avx512", "avx2_vnni", "avx2"])
@pytest.mark.parametrize(
    ("size", "channels", "rows", "outputs", "ahead"),
    [
        ((8, 4), 32, 6, 16, False),
        ((7, 9), 16, 5, 70, True),
        ((6, 11), 8, 4, 30, True),
        ((5, 3), 24, 4, 9, True),
    ],
)
def test_every_access_is_inside(
    size: tuple[int, int], channels: int, rows: int, outputs: int, ahead: bool, isa: str
) -> None:
    """Interpreted on every machine, in items of some tiles by some panels."""
    machine, (height, width) = named(isa), size
    x, weight = drawn(3, (3, *size, channels), outputs, "int8")
    packed = lowbit.pack_convolution(weight)
    (matrix,) = packed.matrices
    private = winograd_tiles.private_bytes(machine, 2 * rows, channels)
    out = np.full((3, *size, outputs), 0x55555555, np.int32)
    arguments = dict.fromkeys(winograd.types) | {
        "x": x.view(np.uint8), "image_stride": x[0].size, "out": out,
        "weights": packed.words(winograd_tiles.panels_of(machine)),
        "row_zero": np.array([5 + 128], np.int32), "column_sum": matrix.column_sums,
        "m": 3, "n": outputs, "channels": channels, "height": height, "width": width, "above": 1,
        "left": 1, "out_height": height, "out_width": width, "item_tiles": rows,
        "item_panels": winograd_tiles.panels_of(machine), "ahead": int(ahead),
        "private": np.zeros(private, np.uint8), "private_bytes": private,
    }  # fmt: skip
    winograd.interpret(
        machine, arguments, format=Windows(True, True), rows=rows,
        lanes=winograd_tiles.lanes_of(machine, channels),
        ends=(height % 4, width % 4), epilogue=Epilogue(a_zero=True, uniform=True),
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected(x, weight, 5, ((1, 1), (1, 1))))


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2", "generic"])
@pytest.mark.parametrize("block", [1, 4])
def test_every_access_to_weights_is_inside(block: int, isa: str) -> None:
    weight = drawn(4, (1, 1, 1, 32), 90)[1]
    packed = lowbit.pack_convolution(weight)
    panels = packed.matrices[0].panels
    made = np.full(36 * len(panels) * 32 * 16, 0x5555, np.int16)
    arguments = {
        "panels": panels, "panel_bytes": panels[0].size, "m": len(panels), "channels": 32,
        "block": block, "out": made,
    }  # fmt: skip
    weight_words.interpret(named(isa), arguments)
    np.testing.assert_array_equal(made, packed.words(block))


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("panels", [1, 4, 7])
def test_words_are_what_the_page_says(panels: int, most: int) -> None:
    rng = np.random.default_rng(panels)
    weight = rng.integers(-128, 128, (panels * 16, 32, 3, 3)).astype(np.int8)
    words = lowbit.pack_convolution(weight).words(most)
    at_points = np.array([[3, 0, 0], [1, 1, 1], [1, -1, 1], [1, 2, 4], [1, -2, 4], [0, 0, 3]])
    both = np.einsum("ia,jb,ocab->ijoc", at_points, at_points, weight.astype(np.int64))
    ordered = both.reshape(36, panels, 16, 16, 2).transpose(0, 3, 1, 2, 4)
    whole = panels // most * most
    parts = [ordered[:, :, i : i + most] for i in range(0, whole, most)]
    parts += [ordered[:, :, i : i + 1] for i in range(whole, panels)]
    np.testing.assert_array_equal(words, np.concatenate([part.ravel() for part in parts]))


def test_it_serves_what_it_makes_faster() -> None:
    """Of the layers of ResNet34, those with few tiles do not pay for their weights."""
    machine = named("avx512_vnni")

    def query(size: int, channels: int, batch: int = 1) -> winograd_tiles.Query:
        image = size**2 * channels
        return winograd_tiles.Query(
            (3, 3), True, channels, channels, batch, image, (size, size), True
        )

    for size, channels in ((56, 64), (28, 128), (14, 256)):
        assert not winograd_tiles.refuses(machine, query(size, channels))
    assert "cycles" in winograd_tiles.refuses(machine, query(7, 512))
    assert not winograd_tiles.refuses(machine, query(7, 512, batch=16))
    for other in ({"window": (3, 1)}, {"plain": False}, {"channels": 60}, {"bounded": False}):
        assert winograd_tiles.refuses(machine, query(56, 64)._replace(**other))
    assert winograd_tiles.refuses(named("generic"), query(56, 64))
    assert winograd_tiles.refuses(named("amx"), query(56, 64))


@pytest.mark.parametrize("threads", [1, 2, 16, 128])
@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2"])
def test_planes_stay_in_the_second_level(threads: int, isa: str) -> None:
    for size, channels, outputs in ((56, 64, 64), (14, 256, 256), (224, 128, 70), (1, 32, 5)):
        query = winograd_tiles.Query(
            (3, 3), True, channels, outputs, 1, 0, (size, size), True, threads
        )
        made = winograd_tiles.cut(named(isa), query)
        assert made.item_tiles % made.rows == 0
        least = winograd_tiles.private_bytes(named(isa), 12, channels)
        assert made.private_bytes <= max(host.caches()["L2"], least)
        panels = -(-outputs // 16)
        assert made.items == -(-query.tiles // made.item_tiles) * -(-panels // made.item_panels)


@pytest.mark.deep("avx512_vnni", "amx*")
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("isa", SETS)
def test_threads_without_items_have_memory(isa: str) -> None:
    """All threads of a network enter each of its steps."""
    _, weight = drawn(6, (1, 5, 5, 8), 16)
    packed = lowbit.pack_convolution(weight)
    geometry = Geometry.of((5, 5), (3, 3), 1, 1)
    asked = Convolution(1, geometry, 8, 1, False, False, packed.matrices[0].format, isa, 16,
                        bounded=True)  # fmt: skip
    prepared = prepare_convolution(asked)
    assert prepared.scratch == 16 * prepared.launches[0].numbers["private_bytes"] > 0


def test_copies_make_words_of_their_own() -> None:
    x, weight = drawn(5, (1, 56, 56, 64), 64)
    packed = lowbit.pack_convolution(weight)
    before = len(pickle.dumps(packed))
    first = lowbit.convolution(x, packed, padding=1)
    assert len(pickle.dumps(packed)) == before
    other = lowbit.pack_convolution(np.flip(weight).copy())
    replaced = dataclasses.replace(packed, matrices=other.matrices)
    copied = copy.deepcopy(packed)
    expected = lowbit.convolution(x, other, padding=1)
    np.testing.assert_array_equal(lowbit.convolution(x, replaced, padding=1), expected)
    np.testing.assert_array_equal(lowbit.convolution(x, copied, padding=1), first)


@pytest.mark.deep
@settings(max_examples=15, deadline=None)
@given(
    size=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    channels=st.sampled_from([8, 16, 24, 32, 64, 80, 96, 128]),
    outputs=st.integers(1, 80),
    padding=st.tuples(*[st.tuples(st.integers(1, 3), st.integers(1, 3))] * 2),
    zero=st.integers(0, 255),
    isa=st.sampled_from(SETS),
    threads=st.integers(1, 3),
)
@pytest.mark.skipif(not SETS, reason="no set here is served")
def test_any(
    size: tuple[int, int], channels: int, outputs: int, padding: Any, zero: int, isa: str,
    threads: int,
) -> None:  # fmt: skip
    x, weight = drawn(outputs, (2, *size, channels), outputs)
    packed = lowbit.pack_convolution(weight // 2)
    forget()
    made = lowbit.convolution(x, packed, padding=padding, zero_point=zero, isa=isa, threads=threads)
    np.testing.assert_array_equal(made, expected(x, weight // 2, zero, padding))
