"""Language models quantized here: small random ones, and what their weights become."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.lm import LanguageModel
from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.convert import convert
from lowbit.lm.quantize import quantize
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import WeightFormat

from .test_architectures import CASES, COMMON, random_model
from .test_gguf_architectures import WRITTEN, write

tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT = "".join(f"{i} green bottles, standing on the wall. " for i in range(400))
W4 = WeightFormat("uint4", 32, "mse")


def model(name, folder, **more):
    """A random model, with a tokenizer of bytes."""
    made = random_model(name, folder, **more)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_ = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(bytes_)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return made


def logits(folder, activations="float"):
    lm = LanguageModel.load(folder, activations=activations, cache="float32", context=128)
    return lm.logits(lm.tokenizer.encode(TEXT[:100]))


def errors(folder, target, formats, **more):
    want = logits(folder)
    made = []
    for format in formats:
        report = quantize(folder, target / format.method, format, **more)
        error = logits(target / format.method) - want
        made.append(float(np.linalg.norm(error) / np.linalg.norm(want)))
        assert report.written.quantized > 0
    return made


@pytest.mark.deep
@pytest.mark.parametrize("name", ["llama", "gemma 2", "olmo 2"])
def test_methods_that_know_the_inputs_are_better(name, tmp_path):
    model(name, tmp_path / "floats")
    formats = [W4._replace(method=method) for method in ("nearest", "gptq", "awq")]
    nearest, gptq, awq = errors(
        tmp_path / "floats", tmp_path, formats, calibration=TEXT, tokens=4096
    )
    assert gptq < 0.7 * nearest
    assert awq < 1.02 * nearest


def test_the_report(tmp_path):
    model("llama", tmp_path / "floats")
    seen = []
    report = quantize(
        tmp_path / "floats", tmp_path / "out", W4._replace(method="gptq"), calibration=TEXT,
        tokens=1024, on_layer=lambda number, count: seen.append((number, count)),
    )  # fmt: skip
    layers = open_checkpoint(tmp_path / "floats").description.layers
    assert seen == [(number + 1, layers) for number in range(layers)]
    assert (report.layers, report.calibration_tokens) == (layers, 1024)
    assert report.evaluated_tokens > 0
    assert report.perplexity_before is not None
    assert report.perplexity_after is not None
    assert abs(np.log(report.perplexity_after / report.perplexity_before)) < 0.1
    assert report.written.bytes_after < report.written.bytes_before
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["method"] == "gptq"
    assert config["group_size"] == 32
    assert "lm_head" in config["modules_to_not_convert"]


@pytest.mark.deep("format1")
@pytest.mark.parametrize("format", [
    WeightFormat("int4", 64, "mse", "gptq"), WeightFormat("int8", None, "minmax", "gptq"),
    WeightFormat("int8"), WeightFormat("uint4", 128),
])  # fmt: skip
def test_formats(format, tmp_path):
    model("llama", tmp_path / "floats")
    text = TEXT if format.needs_activations else None
    report = quantize(tmp_path / "floats", tmp_path / "out", format, calibration=text, tokens=1024)
    weight = open_checkpoint(tmp_path / "out").matrix("blk.1.ffn_up.weight")
    assert isinstance(weight, QuantizedWeight)
    assert weight.weight.format.name == format.dtype
    assert weight.weight.group_size == (format.group_size and min(format.group_size, 64))
    assert (report.perplexity_before is None) == (text is None)
    floats = open_checkpoint(tmp_path / "floats").matrix("blk.1.ffn_up.weight")
    assert isinstance(floats, np.ndarray)
    error = np.linalg.norm(weight.dequantize() - floats) / np.linalg.norm(floats)
    assert error < (0.2 if "4" in format.dtype else 0.02)


@pytest.mark.deep("format0")
@pytest.mark.parametrize("format", [W4._replace(method="awq"), WeightFormat("int8")])
def test_transformers_reads_the_folder(format, tmp_path):
    pytest.importorskip("lowbit.torch.transformers")
    model("llama", tmp_path / "floats")
    quantize(tmp_path / "floats", tmp_path / "out", format, calibration=TEXT, tokens=1024)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = list(range(40))
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].numpy()
    lm = LanguageModel.load(tmp_path / "out", activations="dynamic", cache="float32", context=64)
    # PyTorch's sums end otherwise, by the processor, so that an activation near the middle of two
    # steps may be rounded to the other: in few tokens, by one of 255 steps.
    error = np.abs(lm.logits(ids) - want).max(axis=1) / np.abs(want).max()
    assert (error < 1e-5).sum() > len(ids) // 2
    assert error.max() < 0.02


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mixtral", "qwen 2, experts", "phi 3 with a window"])
def test_experts_and_fused_matrices(name, tmp_path):
    model(name, tmp_path / "floats")
    format = W4._replace(method="gptq")
    quantize(tmp_path / "floats", tmp_path / "out", format, calibration=TEXT, tokens=1024)
    floats, made = (open_checkpoint(tmp_path / one) for one in ("floats", "out"))
    stems = ("attn_output", "ffn_down_exps", "ffn_up_exps", "ffn_up_shexp", "attn_qkv", "ffn_up")
    for stem in (f"blk.2.{stem}.weight" for stem in stems):
        if stem in floats.names:
            weight, want = made.matrix(stem), floats.matrix(stem)
            assert isinstance(weight, QuantizedWeight)
            assert isinstance(want, np.ndarray)
            assert np.linalg.norm(weight.dequantize() - want) < 0.15 * np.linalg.norm(want)
    lm = LanguageModel.load(tmp_path / "out", context=64)
    assert np.isfinite(lm.logits(list(range(30)))).all()


def test_a_gguf_file_of_floats(tmp_path):
    model("llama", tmp_path / "floats")
    path = tmp_path / "model.gguf"
    kind, more = WRITTEN["llama"]
    write(path, tmp_path / "floats", kind, more, {**COMMON, **CASES["llama"][1]})
    quantize(path, tmp_path / "a", W4)
    quantize(tmp_path / "floats", tmp_path / "b", W4)
    ids = list(range(40))
    a, b = (LanguageModel.load(tmp_path / name, context=64).logits(ids) for name in "ab")
    assert np.abs(a - b).max() < 1e-3 * np.abs(b).max()  # an epsilon of float32


@pytest.mark.deep
def test_the_command(tmp_path):
    model("llama", tmp_path / "floats")
    (tmp_path / "text.txt").write_text(TEXT[:4000])

    def call(*arguments):
        return CliRunner().invoke(app, ["quantize", str(tmp_path / "floats"), *arguments])

    out = str(tmp_path / "out")
    done = call("--out", out, "--rounding", "gptq", "--calibration", str(tmp_path / "text.txt"))
    assert done.exit_code == 0, done.stderr
    assert "perplexity" in done.stdout
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["perplexity_after"] > 0
    shown = CliRunner().invoke(app, ["report", out, "--json", str(tmp_path / "again.json")])
    assert shown.exit_code == 0, shown.stderr
    assert f"{report['perplexity_before']:.4g}" in shown.stdout
    assert f"{report['perplexity_after']:.4g}" in shown.stdout
    assert f"{report['written']['quantized']:,}" in shown.stdout
    assert "uint4, one scale" in shown.stdout
    assert json.loads((tmp_path / "again.json").read_text()) == report
    refused = CliRunner().invoke(app, ["report", out, "--latency", str(tmp_path / "again.json")])
    assert "a language model" in refused.stderr
    made = CliRunner().invoke(app, ["generate", out, "1 green", "--raw", "--max-tokens", "4"])
    assert made.exit_code == 0, made.stderr
    for arguments, message in (
        (("--weights", "w3"), "w4 or w8, got 'w3'"), (("--rounding", "hqq"), "got 'hqq'"),
        (("--group-size", "12"), "multiple of 8"), (("--equalize",), "--calibration"),
        (("--rounding", "awq"), "needs a text"),
    ):  # fmt: skip
        done = call("--out", str(tmp_path / "other"), *arguments)
        assert done.exit_code == 2
        assert message in done.stderr
    done = CliRunner().invoke(app, ["quantize", "resnet34", "--out", out, "--evaluate", "x"])
    assert done.exit_code == 2
    assert "language models" in done.stderr


def test_what_is_refused(tmp_path):
    model("llama", tmp_path / "floats")
    quantize(tmp_path / "floats", tmp_path / "out", W4)
    with pytest.raises(ValueError, match=r"attn_q\.weight is quantized already"):
        quantize(tmp_path / "out", tmp_path / "again", W4)
    with pytest.raises(ValueError, match="gptq needs a text"):
        quantize(tmp_path / "floats", tmp_path / "c", W4._replace(method="gptq"))
    with pytest.raises(NotImplementedError, match="not 'hqq'"):
        quantize(tmp_path / "floats", tmp_path / "c", W4._replace(method="hqq"))
    with pytest.raises(ValueError, match="too few tokens"):
        quantize(tmp_path / "floats", tmp_path / "c", W4, calibration="x")
    assert not (tmp_path / "c").exists()
    convert(tmp_path / "out", tmp_path / "copy")  # which is a model as any
    assert (logits(tmp_path / "copy") == logits(tmp_path / "out")).all()
