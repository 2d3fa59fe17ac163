"""Folders that `lowbit quantize --weights kept` writes: the model that was read, to the bit."""

from __future__ import annotations

import json
import re

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.lm import LanguageModel
from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.convert import convert
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights import folder

from . import test_quantized as quantized
from .test_architectures import CASES, COMMON, random_model
from .test_gguf_architectures import WRITTEN, write

safetensors_torch = pytest.importorskip("safetensors.torch")

IDS = np.random.default_rng(1).integers(0, 300, 40).tolist()


def weights(checkpoint):
    return {name for name in checkpoint.names if name.endswith(".weight")}


def check(source, target):
    """What is written has the same logits, and the same integers, scales and zero points."""
    written = convert(source, target)
    one, other = (LanguageModel.load(path, context=64, sequences=1) for path in (source, target))
    assert (one.logits(IDS) == other.logits(IDS)).all()
    a, b = (open_checkpoint(path) for path in (source, target))
    assert weights(a) == weights(b)
    for name in a.names:
        if not re.search(r"(attn_[qkvo]\w*|ffn_(up|gate|down)\w*|output)\.weight$", name):
            continue
        if "norm" in name or "inp" in name:
            continue
        x, y = a.matrix(name), b.matrix(name)
        assert isinstance(x, QuantizedWeight) == isinstance(y, QuantizedWeight)
        if isinstance(x, QuantizedWeight) and isinstance(y, QuantizedWeight):
            assert x.weight.format == y.weight.format
            assert x.weight.group_size == y.weight.group_size
            assert (x.weight.values == y.weight.values).all()
            assert (x.dequantize() == y.dequantize()).all()
    return written


@pytest.mark.deep("gemma 2")
@pytest.mark.parametrize("name", [
    "llama", "gemma 2", "gemma 3 with scaled positions", "phi 3, many positions", "mixtral",
    "qwen 2, experts",
])  # fmt: skip
def test_architectures_of_gguf(name, tmp_path):
    random_model(name, tmp_path / "floats")
    kind, more = WRITTEN[name]
    path = tmp_path / "model.gguf"
    write(path, tmp_path / "floats", kind, more, {**COMMON, **CASES[name][1]})
    written = check(path, tmp_path / "out")
    assert written.quantized == 0
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("name", ["gemma 2", "mixtral", "smollm 3"])
def test_folders_of_floats(name, tmp_path):
    random_model(name, tmp_path / "floats")
    check(tmp_path / "floats", tmp_path / "out")


@pytest.mark.deep("Q5_0", "Q5_1", "Q8_0")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_types_of_blocks(kind, tmp_path, monkeypatch):
    """Of all matrices, the table of embeddings among them, which is the head too."""
    random_model("llama", tmp_path / "floats", tie_word_embeddings=True)
    path = tmp_path / "model.gguf"
    add = gguf.GGUFWriter.add_tensor

    def quantizing(self, name, value):
        if value.ndim < 2:
            return add(self, name, value)
        code = gguf.GGMLQuantizationType[kind]
        return add(self, name, gguf.quants.quantize(value, code), raw_dtype=code)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantizing)
    write(path, tmp_path / "floats", "llama", {}, COMMON)
    written = check(path, tmp_path / "out")
    assert bool(written.quantized) == kind.startswith("Q")
    assert written.notes == {}


@pytest.mark.deep("packed, rows")
@pytest.mark.parametrize("name", [
    "gptq, act-order", "gptq v2, act-order, each its own", "gptq, 8 bits, no groups", "awq",
    "packed, rows", "bytes, zero points", "float8", "bitsandbytes",
])  # fmt: skip
def test_folders_that_others_quantized(name, tmp_path):
    quantized.written(tmp_path / "source", name)
    (tmp_path / "source/tokenizer_config.json").write_text("{}")
    written = check(tmp_path / "source", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    ordered = "act-order" in name
    assert config["format_version"] == (folder.ORDERED_VERSION if ordered else folder.VERSION)
    assert set(config["modules_to_not_convert"]) >= {quantized.LEFT_OUT, "lm_head"}
    assert (tmp_path / "out/tokenizer_config.json").is_file()
    assert bool(written.notes) == name.startswith("float8")


def test_a_folder_of_lowbits_is_read_again(tmp_path):
    quantized.written(tmp_path / "source", "gptq, act-order")
    convert(tmp_path / "source", tmp_path / "first")
    check(tmp_path / "first", tmp_path / "second")


def test_several_files(tmp_path, monkeypatch):
    random_model("llama", tmp_path / "floats")
    monkeypatch.setattr("lowbit.lm.convert._SHARD", 100_000)
    check(tmp_path / "floats", tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 1
    assert set(index["weight_map"].values()) == files


def test_a_target_that_holds_something_is_kept(tmp_path):
    random_model("llama", tmp_path / "floats")
    with pytest.raises(FileExistsError):
        convert(tmp_path / "floats", tmp_path / "floats")


def test_an_order_that_is_none_is_refused(tmp_path):
    quantized.written(tmp_path / "source", "gptq, act-order")
    convert(tmp_path / "source", tmp_path / "out")
    file, name = tmp_path / "out/model.safetensors", f"{quantized.Q}{folder.ORDER}"
    tensors = safetensors_torch.load_file(file)
    tensors[name][0] = tensors[name][1]
    safetensors_torch.save_file(tensors, file)
    with pytest.raises(ValueError, match="attn_q: weight_order must name each input once"):
        LanguageModel.load(tmp_path / "out")


@pytest.mark.parametrize("spoil", [
    lambda held: held.pop("layers"), lambda held: held.update(more=1),
    lambda held: held.update(windows=3), lambda held: held.update(heads=-1),
])  # fmt: skip
def test_a_description_that_is_damaged(spoil, tmp_path):
    kind, more = WRITTEN["llama"]
    random_model("llama", tmp_path / "floats")
    write(tmp_path / "model.gguf", tmp_path / "floats", kind, more, COMMON)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    spoil(config["lowbit_description"])
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"description|heads"):
        LanguageModel.load(tmp_path / "out")


@pytest.mark.deep
def test_the_tokenizer_of_gguf_comes_along(tmp_path):
    from language_models import smollm2

    path = smollm2()
    result = CliRunner().invoke(
        app,
        ["quantize", str(path), "--weights", "kept", "--out", str(tmp_path / "out"), "--json", "-"],
    )
    assert result.exit_code == 0
    one, other = LanguageModel.load(path), LanguageModel.load(tmp_path / "out")
    ids = one.tokenizer.encode("Träume, 3 of them.")
    assert other.tokenizer.encode("Träume, 3 of them.") == ids
    assert other.tokenizer.ends == one.tokenizer.ends
    messages = [{"role": "user", "content": "x"}]
    assert other.tokenizer.chat(messages) == one.tokenizer.chat(messages)
    assert (other.logits(ids) == one.logits(ids)).all()
