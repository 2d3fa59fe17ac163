"""Models of transformers that are quantized while they are loaded, saved, and loaded again."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import safetensors.torch as safetensors_torch
import transformers
from transformers.quantizers.base import HfQuantizer

from lowbit.lm import LanguageModel
from lowbit.torch import Int4WeightOnlyConfig, QuantizedLinear, QuantizedWeight, quantize_
from lowbit.torch import weight as weights
from lowbit.torch.kinds import QuantizedEmbedding
from lowbit.torch.transformers import SCHEMES, LowbitConfig, LowbitQuantizer, prepare_save
from lowbit.weights import folder as files
from lowbit.weights.format import INT8, WeightFormat

IDS = torch.from_numpy(np.random.default_rng(1).integers(0, 300, (1, 40)))
COMMON = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.15, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
           "moe_intermediate_size": 96}  # fmt: skip
ACTIVATIONS = {"w4a8": "dynamic", "w4a16": "float", "w8a8": "dynamic"}
Auto: Any = transformers.AutoModelForCausalLM


def written(folder: Path, kind: str = "Llama", dtype: Any = torch.float32, **more: Any) -> Any:
    """A random model, saved; the float model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | more)
    model = Auto.from_config(config, dtype=dtype).eval()
    model.save_pretrained(folder)
    return model


def put(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Tensors of lowbit's own format in place of a folder's, and config.json that says so."""
    safetensors_torch.save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = files.CONFIG | {"scheme": "w4a16"}
    (folder / "config.json").write_text(json.dumps(config))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def names_in(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors")
            for name in safetensors_torch.load_file(file)}  # fmt: skip


@pytest.mark.deep(
    "torch.bfloat16-Llama-w4a16",
    "torch.bfloat16-Qwen2-w4a16",
    "torch.float32-Llama-w4a8",
    "torch.float32-Llama-w8a8",
    "torch.float32-Qwen2-w4a8",
)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_saved_and_loaded_again(
    scheme: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The layers are those of `quantize_`, and of the folder, also in lowbit.lm."""
    floats = written(tmp_path / "float", kind, dtype)
    config = LowbitConfig(scheme)
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=config, dtype=dtype)
    assert model.dtype is dtype
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[1].mlp.down_proj) is QuantizedLinear
    want = logits(quantize_(floats, config.layers, lambda _, name: name != "lm_head"))
    assert torch.equal(logits(model), want)
    made = model.generate(IDS[:, :7], max_new_tokens=6, do_sample=False)

    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    described = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert (described["quant_method"], described["scheme"]) == ("lowbit", scheme)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    names = names_in(tmp_path / "saved")
    assert "model.layers.0.mlp.up_proj.weight_values" in names
    assert not names & {"model.layers.0.mlp.up_proj.weight", "lm_head.weight_values"}
    again = Auto.from_pretrained(tmp_path / "saved", dtype=dtype)
    assert torch.equal(logits(again), want)
    assert torch.equal(again.generate(IDS[:, :7], max_new_tokens=6, do_sample=False), made)
    again.save_pretrained(tmp_path / "twice")
    assert names_in(tmp_path / "twice") == names

    lm = LanguageModel.load(tmp_path / "twice", activations=ACTIVATIONS[scheme], cache="float32",
                            threads=1)  # fmt: skip
    error = np.abs(lm.logits(IDS[0].tolist()) - want[0].numpy()).max() / want.abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 0.1)


def test_the_same_integers_in_both(tmp_path: Path) -> None:
    written(tmp_path / "float")
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=LowbitConfig("w4a8"))
    model.save_pretrained(tmp_path / "saved")
    lm = LanguageModel.load(tmp_path / "saved")
    ours = lm._checkpoint.matrix("blk.1.ffn_down.weight")
    theirs = model.model.layers[1].mlp.down_proj.weight.record()
    assert not isinstance(ours, np.ndarray)
    for part in ("values", "scale", "zero_point"):
        assert (getattr(ours.weight, part) == getattr(theirs.weight, part)).all()


def test_weights_are_quantized_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    """When one is, those that come later are not there yet, and earlier ones are integers."""
    written(tmp_path)
    seen = []
    made = QuantizedWeight.from_float.__func__

    def watched(cls: Any, tensor: Any, *args: Any) -> Any:
        seen.append(tensor.numel())
        return made(cls, tensor, *args)

    monkeypatch.setattr(QuantizedWeight, "from_float", classmethod(watched))
    model = Auto.from_pretrained(tmp_path, quantization_config=LowbitConfig("w4a8"))
    assert len(seen) == 14
    assert not any(one.is_meta for one in model.parameters())


@pytest.mark.parametrize("embeddings", [8, 4])
def test_embeddings_that_are_no_head(embeddings: int, tmp_path: Path) -> None:
    floats = written(tmp_path / "float")
    config = LowbitConfig("w4a16", embeddings=embeddings)
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=config)
    assert type(model.model.embed_tokens) is QuantizedEmbedding
    want = logits(quantize_(floats, config.layers, lambda _, name: name != "lm_head"))
    assert torch.equal(logits(model), want)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(Auto.from_pretrained(tmp_path / "saved")), want)
    lm = LanguageModel.load(tmp_path / "saved", activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS[0].tolist()) - want[0].numpy()).max() / want.abs().max()
    assert error < 1e-5


def test_ties(tmp_path: Path) -> None:
    """A tied head stays in float, unless both sides are to become integers."""
    floats = written(tmp_path / "float", tie_word_embeddings=True)
    config = LowbitConfig("w4a16")
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is nn.Linear
    with pytest.raises(ValueError, match=r"are one weight, of which .* takes one side"):
        Auto.from_pretrained(
            tmp_path / "float", quantization_config=LowbitConfig("w4a16", []),
        )  # fmt: skip
    config = LowbitConfig("w4a16", [], embeddings=8)
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is QuantizedLinear
    want = logits(quantize_(floats, config.layers))
    assert torch.equal(logits(model), want)
    model.save_pretrained(tmp_path / "saved")
    assert not {name for name in names_in(tmp_path / "saved") if name.startswith("lm_head")}
    again = Auto.from_pretrained(tmp_path / "saved")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert type(again.lm_head) is QuantizedLinear
    assert torch.equal(logits(again), want)
    lm = LanguageModel.load(tmp_path / "saved", activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS[0].tolist()) - want[0].numpy()).max() / want.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_stay_in_float_and_are_named(kind: str, tmp_path: Path, caplog: Any) -> None:
    written(tmp_path / "float", kind, **EXPERTS)
    with caplog.at_level(logging.WARNING, "lowbit"):
        model = Auto.from_pretrained(tmp_path / "float", quantization_config=LowbitConfig("w4a16"))
    assert "experts stay in float" in caplog.text
    assert "model.layers.0.mlp.experts.gate_up_proj" in caplog.text
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype is torch.float32
    assert type(model.model.layers[0].self_attn.q_proj) is QuantizedLinear
    want = logits(model)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(Auto.from_pretrained(tmp_path / "saved")), want)
    lm = LanguageModel.load(tmp_path / "saved", activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS[0].tolist()) - want[0].numpy()).max() / want.abs().max()
    assert error < 1e-4


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_that_a_folder_has_in_integers_become_floats(kind: str, tmp_path: Path) -> None:

    floats = written(tmp_path, kind, **EXPERTS)
    file, state = tmp_path / "model.safetensors", {}
    for name, value in safetensors_torch.load_file(file).items():
        stem = name.rpartition(".")[0]
        if ".experts." not in name:
            state[name] = value
            continue
        record = WeightFormat("uint4", 32).quantize(value.numpy())
        state |= {f"{stem}.{part}": torch.from_numpy(one)
                  for part, one in files.to_tensors(record).items()}  # fmt: skip
    put(tmp_path, state)
    if not hasattr(HfQuantizer, "serialized_names"):
        with pytest.raises(NotImplementedError, match="experts"):
            Auto.from_pretrained(tmp_path)
        return
    model = Auto.from_pretrained(tmp_path)
    made, want = (one.model.layers[1].mlp.experts.down_proj for one in (model, floats))
    assert made.shape == want.shape
    rounded = WeightFormat("uint4", 32).quantize(want[2].detach().numpy()).dequantize()
    assert np.array_equal(made[2].detach().numpy(), rounded)
    lm = LanguageModel.load(tmp_path, activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS[0].tolist()) - logits(model)[0].numpy()).max()
    assert error < 1e-4 * logits(model).abs().max()


def test_weights_that_lie_the_other_way_round(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4)
    floats = Auto.from_config(config).eval()
    floats.save_pretrained(tmp_path / "float")
    quantization = LowbitConfig("w4a8")
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=quantization)
    assert isinstance(model.transformer.h[0].attn.c_attn.weight, QuantizedWeight)
    model.save_pretrained(tmp_path / "saved")
    again = Auto.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))


def test_a_folder_says_what_each_weight_is(tmp_path: Path) -> None:
    """Other bits, groups and zero points than the configuration's, as converters write them."""

    floats = written(tmp_path)
    file, kinds = tmp_path / "model.safetensors", {
        "q_proj": INT8, "k_proj": WeightFormat("int4", 16), "v_proj": WeightFormat("uint4", None),
        "o_proj": WeightFormat("uint4", 24), "up_proj": WeightFormat("uint4", 32, method="hqq"),
    }  # fmt: skip
    state = {}
    for name, value in safetensors_torch.load_file(file).items():
        stem = name.removesuffix(".weight")
        if (kind := kinds.get(stem.rpartition(".")[2])) is None:
            state[name] = value
            continue
        record = kind.quantize(value.numpy())
        floats.get_parameter(name).data.copy_(torch.from_numpy(record.dequantize()))
        state |= {f"{stem}.{part}": torch.from_numpy(one)
                  for part, one in files.to_tensors(record).items()}  # fmt: skip
    put(tmp_path, state)
    model = Auto.from_pretrained(tmp_path)
    layer = model.model.layers[0]
    assert type(layer.mlp.down_proj) is nn.Linear
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert type(getattr(layer.self_attn, name)) is QuantizedLinear
        want = floats.get_parameter(f"model.layers.0.self_attn.{name}.weight")
        assert torch.equal(getattr(layer.self_attn, name).weight.dequantize(), want)
    assert (logits(model) - logits(floats)).norm() < 0.05 * logits(floats).norm()
    model.save_pretrained(tmp_path / "saved")
    again = Auto.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))


def test_what_quantize_has_made_can_be_saved(tmp_path: Path) -> None:
    model = written(tmp_path / "float")
    with pytest.raises(ValueError, match="no layer that quantize_"):
        prepare_save(model)
    config = Int4WeightOnlyConfig(32, method="gptq", embeddings=None)
    quantize_(model, config, lambda _, name: name != "lm_head", calibration=[(IDS,)])
    with pytest.raises(NotImplementedError, match="prepare_save"):
        model.save_pretrained(tmp_path / "saved")
    prepare_save(model)
    model.save_pretrained(tmp_path / "saved")
    again = Auto.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    lm = LanguageModel.load(tmp_path / "saved", activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS[0].tolist()) - logits(model)[0].numpy()).max()
    assert error < 1e-5 * logits(model).abs().max()


@pytest.mark.parametrize(("args", "more", "error", "message"), [
    (("w2a16",), {}, ValueError, "unknown scheme 'w2a16'; there are 'w4a8', 'w4a16', 'w8a8'"),
    (("w8a8",), {"group_size": 32}, ValueError, "'w8a8' has no option 'group_size'"),
    (("w4a16",), {"group_size": 30}, ValueError, "group_size"),
    (("w4a16",), {"method": "best"}, ValueError, "unknown method 'best'"),
    (("w4a16", "lm_head"), {}, TypeError, "must be a list of names, got 'lm_head'"),
    (("w4a16",), {"format_version": 2}, ValueError, "reads folders of .* got .*2"),
])  # fmt: skip
def test_a_configuration_that_is_wrong(
    args: Any, more: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LowbitConfig(*args, **more)


def test_what_cannot_be_loaded(tmp_path: Path, caplog: Any) -> None:
    written(tmp_path)
    with pytest.raises(ValueError, match=r"method='gptq' needs data.*prepare_save"):
        Auto.from_pretrained(tmp_path, quantization_config=LowbitConfig("w4a8", method="gptq"))
    nothing = LowbitConfig("w4a8", ["model", "lm_head"])
    with pytest.raises(ValueError, match="nothing to quantize"):
        Auto.from_pretrained(tmp_path, quantization_config=nothing)
    with caplog.at_level(logging.WARNING, "lowbit"):
        config = LowbitConfig("w4a8", ["lm_head", "down_porj", r"model.layers.1.*"])
        model = Auto.from_pretrained(tmp_path, quantization_config=config)
    assert "no module is called down_porj" in caplog.text
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16"])
def test_what_has_no_kernel_on_a_gpu_is_refused_before_weights_are_read(scheme: str) -> None:
    config = LowbitConfig(scheme, group_size=24)
    with pytest.raises(ValueError, match="group_size must be a multiple of 32 there"):
        LowbitQuantizer(config, pre_quantized=False).validate_environment(device_map={"": 0})
    with pytest.raises(ValueError, match="disk"):
        LowbitQuantizer(config).validate_environment(device_map={"": "disk"})


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16"])
def test_tiles_of_a_gpu(scheme: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU: weights in tiles, of which folders say nothing."""
    pytest.importorskip("triton")
    written(tmp_path / "float")
    options: dict[str, Any] = {"symmetric": True} if scheme == "w4a8" else {}
    config = LowbitConfig(scheme, **options)
    want = logits(Auto.from_pretrained(tmp_path / "float", quantization_config=config))
    monkeypatch.setitem(weights.PACKING_OF, "cpu", "tiles")
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=config)
    assert model.model.layers[0].mlp.up_proj.weight.packing == "tiles"
    model.save_pretrained(tmp_path / "saved")
    assert (logits(model) - want).norm() < 0.01 * want.norm()
    monkeypatch.undo()
    assert torch.equal(logits(Auto.from_pretrained(tmp_path / "saved")), want)


def test_a_damaged_folder_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "float")
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=LowbitConfig("w4a16"))
    model.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved/model.safetensors"
    state = safetensors_torch.load_file(file)
    state["model.layers.0.mlp.up_proj.weight_scale"][3, 0] = float("nan")
    safetensors_torch.save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="weights"):
        Auto.from_pretrained(tmp_path / "saved")


_ALONE = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except Exception as error:
    print("refused:", error)
"""


@pytest.mark.deep
def test_without_lowbit_transformers_says_that_it_does_not_know_the_method(tmp_path: Path) -> None:
    written(tmp_path / "float")
    model = Auto.from_pretrained(tmp_path / "float", quantization_config=LowbitConfig("w4a16"))
    model.save_pretrained(tmp_path / "saved")
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, str(tmp_path / "saved")],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "Unknown quantization type, got lowbit" in said
    assert "weight_values" in said
