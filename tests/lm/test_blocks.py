"""Blocks of GGUF: against the package that defines them, on random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from lowbit.lm.blocks import BLOCKS

QUANTIZED = [name for name, one in BLOCKS.items() if one.parts is not None]
# Where the halves lie that must be numbers.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_rows(name, rows=5, width=512, seed=0):
    """Random bytes, with scales and offsets of both signs and some that are 0."""
    block, rng = BLOCKS[name], np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * width // block.elements, block.bytes), np.uint8)
    for at in HALVES[name]:
        halves = rng.standard_normal(len(data)).astype(np.float16)
        halves[::7] = 0
        data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if name == "Q8_0":  # -128 is in no file: it would be 128 with a negative scale
        data[:, 2:][data[:, 2:] == 128] = 129
    return data.reshape(rows, -1)


def test_every_type_is_that_of_the_package():
    for name, block in BLOCKS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (kind.value, *gguf.GGML_QUANT_SIZES[kind]) == (
            block.code,
            block.elements,
            block.bytes,
        )


@pytest.mark.parametrize("name", QUANTIZED)
def test_numbers_are_those_of_the_package(name):
    rows = random_rows(name)
    want = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert (BLOCKS[name].numbers(rows) == want).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_weight_is_what_the_blocks_are(name):
    rows = random_rows(name)
    want = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    made = BLOCKS[name].weight(rows)
    assert made.weight.shape == want.shape
    # But for the zero point, which is rounded to float32.
    scale = made.weight.spread(made.weight.scale)
    zero = np.abs(made.weight.spread(
        made.weight.zero_point if made.zero_point is None else made.zero_point
    ))  # fmt: skip
    assert (np.abs(made.dequantize() - want) <= 2.0**-22 * scale * (256 + zero)).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_are_those_of_the_weight(name):
    """To the bit, so that tables of embeddings are the same in folders of lowbit."""
    rows = random_rows(name)
    assert (BLOCKS[name].rows(rows) == BLOCKS[name].weight(rows).dequantize()).all()


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_rows_whose_scales_are_positive_are_too(name, monkeypatch):
    """No weight is made for them: a step of a text reads a row."""
    block, rows = BLOCKS[name], random_rows(name)
    data = rows.reshape(-1, block.bytes)
    for at in HALVES[name]:
        halves = 0.5 + np.random.default_rng(at).random(len(data))
        data[:, at : at + 2] = halves.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if name.endswith("K"):
        data[:, 4:16] |= 0x11  # scales of 6 bits
    want = block.weight(rows).dequantize()
    monkeypatch.setattr(type(block), "weight", None)
    assert (block.rows(rows) == want).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats(name):
    values = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    rows = values if name == "F32" else gguf.quantize(values, gguf.GGMLQuantizationType[name])
    rows = np.ascontiguousarray(rows).view(np.uint8).reshape(3, -1)
    want = gguf.dequantize(rows, gguf.GGMLQuantizationType[name])
    assert (BLOCKS[name].numbers(rows) == want).all()
    with pytest.raises(ValueError, match="floats"):
        BLOCKS[name].weight(rows)


def test_a_scale_that_is_no_number_is_refused():
    rows = random_rows("Q4_0")
    rows[1, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not finite"):
        BLOCKS["Q4_0"].weight(rows)
