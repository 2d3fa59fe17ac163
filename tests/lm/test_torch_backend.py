"""The backend for GPUs, by PyTorch on the CPU: against the engine for CPUs, in float32."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from language_models import smollm2

from lowbit.lm import LanguageModel, Sampling, torch_backend
from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.torch_backend import TorchBackend
from lowbit.weights.format import WeightFormat

from .test_architectures import CASES, random_model
from .test_quantized import written

IDS = np.random.default_rng(1).integers(0, 300, 50).tolist()

pytestmark = pytest.mark.deep  # a process that uses PyTorch for the first time takes seconds


def by_torch(path, weights=None, context=256, dtype=torch.float32, cache="float32", sequences=4):
    checkpoint = open_checkpoint(path)
    device = torch.device("cpu")
    backend = TorchBackend(checkpoint, weights, cache, sequences, context, device, dtype)
    return LanguageModel(path, checkpoint, backend, context)


def by_cpu(path, **more):
    return LanguageModel.load(path, activations="float", cache="float32", threads=2, **more)


def stepped(lm, cuts, count=4):
    """Sequences that begin with so many tokens, then steps of all: logits of all steps."""
    opened = [lm.sequence() for _ in cuts]
    rows = [np.stack([one.feed(IDS[:cut]) for one, cut in zip(opened, cuts, strict=True)])]
    for at in range(count):
        rows.append(lm.step(opened, [IDS[cut + at] for cut in cuts]))
    for one in opened:
        one.close()
    return np.concatenate(rows)


def near(made, want, tolerance=1e-5):
    assert made.shape == want.shape
    assert made.dtype == want.dtype == np.float32
    assert np.abs(made - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("name", CASES)
def test_logits_of_every_architecture(name, tmp_path, monkeypatch):
    """In chunks of a prompt, and in steps of three sequences, of which none is in a first slot."""
    pytest.importorskip("transformers")
    random_model(name, tmp_path)
    made, want = by_torch(tmp_path), by_cpu(tmp_path, context=256)
    near(made.logits(IDS), want.logits(IDS))
    monkeypatch.setattr(torch_backend, "_ROWS", 16)
    near(made.logits(IDS), want.logits(IDS))
    held = [one.sequence() for one in (made, want)]
    near(stepped(made, (20, 3, 11)), stepped(want, (20, 3, 11)))
    for one in held:
        one.close()


@pytest.mark.parametrize("name", ["llama", "gemma 2", "qwen 3"])
def test_sixteen_bits_are_near(name, tmp_path):
    """The 16-bit kernels of attention, where a layer has neither window nor cap."""
    random_model(name, tmp_path)
    made, want = by_torch(tmp_path, dtype=torch.bfloat16, cache="bfloat16"), by_cpu(tmp_path)
    for one, other in ((made.logits(IDS), want.logits(IDS)),
                       (stepped(made, (20, 3)), stepped(want, (20, 3)))):  # fmt: skip
        assert np.linalg.norm(one - other) <= 0.06 * np.linalg.norm(other)


@pytest.mark.parametrize("name", ["llama", "granite", "mixtral", "qwen 2, experts",
                                  "llama with biases, tied"])  # fmt: skip
@pytest.mark.parametrize("form", [WeightFormat("int4", 32), WeightFormat("uint4", None)])
def test_floats_that_are_quantized(name, form, tmp_path):
    random_model(name, tmp_path)
    made, want = by_torch(tmp_path, form), by_cpu(tmp_path, weights=form)
    assert not made.notes
    near(made.logits(IDS), want.logits(IDS), 1e-4)


@pytest.mark.parametrize("name", [
    "gptq, act-order", "gptq v2, act-order, each its own", "gptq, no groups", "awq",
    "packed, zero points", "packed, 8 bits", "lowbit, 8 bits", "float8", "lowbit, a shorter group",
    "lowbit, symmetric", "lowbit, real zero points",
])  # fmt: skip
def test_quantized_checkpoints(name, tmp_path):
    """What no kernel takes is computed as floats, and noted."""
    model = written(tmp_path, name)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0].numpy()
    lm = by_torch(tmp_path)
    rounded = name == "float8"  # when it is read
    near(lm.logits(IDS), want, 0.1 if rounded else 1e-5)
    near(stepped(lm, (20, 3)), stepped(by_cpu(tmp_path), (20, 3)), 0.1)
    floats = [note for note in lm.notes if "no kernel" in note]
    assert bool(floats) == (name in ("packed, 8 bits", "lowbit, a shorter group"))


@pytest.mark.parametrize("form", [None, "Q4_0"])
def test_gates_that_files_have_fused(form, tmp_path):
    gguf = pytest.importorskip("gguf")
    from .test_gguf_architectures import COMMON, WRITTEN, fused, write

    config = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    random_model("mixtral", tmp_path, **config)
    kind, more = WRITTEN["mixtral"]
    path, types = tmp_path / "fused.gguf", gguf.GGMLQuantizationType
    write(path, tmp_path, kind, more, {**COMMON, **config}, fused, form and types[form])
    near(by_torch(path).logits(IDS), by_cpu(path).logits(IDS))


@pytest.mark.parametrize("name", ["lowbit", "lowbit, real zero points", "lowbit, 8 bits"])
def test_embeddings_that_are_quantized(name, tmp_path):
    model = written(tmp_path, name, lambda state: state.pop("lm_head.weight"), layers="embed")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    table = model.model.embed_tokens.weight.detach()
    model.lm_head.weight.data.copy_(table)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0].numpy()
    near(by_torch(tmp_path).logits(IDS), want)


def test_a_real_model():
    """Zero points that are real numbers, a table that the head shares; texts together."""
    lm, want = by_torch(smollm2(), context=64), by_cpu(smollm2(), context=64)
    prompts = ["What is the capital of France?", "Hi"]
    options: dict[str, Any] = {"max_tokens": 3, "sampling": Sampling()}
    texts = [["".join(one) for one in each.generate_many(prompts, **options)]
             for each in (lm, want)]  # fmt: skip
    assert texts[0] == texts[1]
    assert not lm.notes


def test_a_context_that_is_full_and_what_is_refused(tmp_path):
    random_model("llama", tmp_path)
    lm = by_torch(tmp_path, context=40, sequences=3)
    with lm.sequence() as sequence:
        with pytest.raises(ValueError, match="0 tokens and 41 more do not fit the context of 40"):
            sequence.feed([1] * 41)
        sequence.feed(IDS[:39])
        row = sequence.feed(IDS[39:40])
        with pytest.raises(ValueError, match="40 tokens and 1 more"):
            sequence.feed([5])
    near(row, by_cpu(tmp_path).logits(IDS[:40])[-1])
    with lm.sequence() as sequence, pytest.raises(ValueError, match="0 to 299, not 300"):
        sequence.feed([300])
    with pytest.raises(ValueError, match="no tokens"):
        lm.logits([])
    assert lm.perplexity(IDS[:40]) == pytest.approx(by_cpu(tmp_path).perplexity(IDS[:40]), 1e-4)


def test_what_was_known_is_not_computed_again(tmp_path):
    random_model("llama", tmp_path)
    lm = by_torch(tmp_path)
    with lm.sequence() as sequence:
        want = sequence.feed(IDS)
    with lm.sequence(IDS) as sequence:
        assert sequence.length == len(IDS) - 1
        near(sequence.feed(IDS[-1:], prompt=True), want)
        sequence.rewind(30)
        near(sequence.rows(IDS[30:36]), lm.logits(IDS[:36])[30:])


def test_a_sequence_takes_over_what_another_knows(tmp_path):
    random_model("llama", tmp_path)
    lm = by_torch(tmp_path)
    with lm.sequence() as first, lm.sequence() as second:
        want = first.feed(IDS)
        second.feed(IDS[:5])
        second.copy(first, 30)
        assert second.ids == IDS[:30]
        near(second.feed(IDS[30:]), want)


def test_load_on_a_gpu(tmp_path, monkeypatch):
    """As far as it goes without one."""
    random_model("qwen 3", tmp_path)
    asked = []

    def gpu(name):
        asked.append(name)
        return torch.device("cpu")

    monkeypatch.setattr(torch_backend, "gpu", gpu)
    lm = LanguageModel.load(tmp_path, device="cuda:1", weights="int4", context=64, sequences=2)
    assert asked == ["cuda:1"]
    want = by_cpu(tmp_path, weights="int4").logits(IDS)
    assert np.linalg.norm(lm.logits(IDS) - want) <= 0.06 * np.linalg.norm(want)
    assert lm.context == 64
    assert len(lm._free) == 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"device": "tpu"}, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        ({"device": "cuda", "threads": 2}, ValueError, "threads and isa are the CPU's"),
        ({"device": "cuda", "cache": "int8"}, NotImplementedError, "a cache of int8"),
        ({"device": "cuda", "activations": "grouped"}, NotImplementedError, "'grouped'"),
        ({"device": "cuda", "context": 300}, ValueError, "from 1 to 256"),
        ({"device": "cuda:7"}, RuntimeError, "finds no 'cuda:7' here"),
    ],
)
def test_what_a_gpu_refuses(given, error, message, tmp_path):
    random_model("llama", tmp_path)
    with pytest.raises(error, match=message):
        LanguageModel.load(tmp_path, **given)
