"""Checkpoints that are quantized without being loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lowbit.torch.checkpoint
from lowbit.torch import (
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    load,
    quantize_,
    quantize_checkpoint,
)


class Writer(nn.Module):
    """Tied weights, a computed table, and layers that stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.body = nn.Linear(48, 70)
        self.norm = nn.LayerNorm(70)
        self.back = nn.Linear(70, 48, bias=False)
        self.head = nn.Linear(48, 50, bias=False)
        self.head.weight = self.embed.weight
        table = torch.linspace(0, 1, 48, device=self.body.weight.device)
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.get_buffer("table").to(x.dtype)
        return self.head(self.back(self.norm(self.body(x))))


class Initialized(Writer):
    """One that can compute its table anew, as transformers' models do."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.get_buffer("values").copy_(torch.linspace(0, 1, 48))

    def __init__(self) -> None:
        super().__init__()
        del self.table
        self.inner = Table()

    def get_buffer(self, target: str) -> Tensor:
        return self.inner.values if target == "table" else super().get_buffer(target)


class Table(nn.Module):
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.linspace(0, 1, 48), persistent=False)


TOKENS = torch.arange(12).reshape(3, 4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowbit.torch.checkpoint, "_BLOCK", 500)


def written(model: nn.Module, folder: Path, files: int) -> Path:
    """A checkpoint as transformers writes it: what is tied is there once."""
    state = {key: one for key, one in model.state_dict().items() if key != "head.weight"}
    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    placed = {key: f"model-{n % files}.safetensors" for n, key in enumerate(state)}
    for name in set(placed.values()):
        save_file({key: state[key] for key, at in placed.items() if at == name}, folder / name)
    index = json.dumps({"weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [Int8DynamicConfig(), Int4WeightOnlyConfig(16), Int4WeightOnlyConfig(16, method="hqq")],
    ids=repr,
)
def test_as_in_memory(config: Any, files: int, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Initialized().eval().to(dtype)
    model.inner.float()
    source = written(model, tmp_path / "float", files)
    with torch.device("meta"):
        shape, empty = Initialized().eval(), Initialized().eval()
    told = quantize_checkpoint(source, tmp_path / "small", config, shape)
    assert {one.name for one in told.layers if one.quantized} == {
        "embed.weight", "body.weight", "back.weight",
    }  # fmt: skip
    assert told.bytes_before == sum(
        one.numel() * dtype.itemsize
        for key, one in model.state_dict().items()
        if key != "head.weight"
    )
    load(empty, tmp_path / "small")
    quantize_(model, config)
    with torch.inference_mode():
        assert torch.equal(empty(TOKENS), model(TOKENS))
    assert empty.head.weight is empty.embed.weight
    assert next(empty.norm.parameters()).dtype == dtype


def test_without_a_model_matrices_are_linear_layers(tmp_path: Path) -> None:
    model = Writer().eval()
    source = written(model, tmp_path, 1) / "model.safetensors"
    config = Int8DynamicConfig()
    quantize_checkpoint(source, tmp_path / "small", config)
    into = load(Writer().eval(), tmp_path / "small")
    quantize_(model, config)
    with torch.inference_mode():
        assert torch.equal(into(TOKENS), model(TOKENS))
    called = quantize_checkpoint(
        source, tmp_path / "other", config, Writer(), lambda _, name: name != "back",
        rename=lambda key: key,
    )  # fmt: skip
    assert {one.name: one.why for one in called.layers}["back.weight"] == "filter_fn left it out"


def test_tables_that_no_file_holds_are_named(tmp_path: Path) -> None:
    source = written(Writer(), tmp_path, 1)
    with torch.device("meta"):
        model = Writer()
    assert model.body.weight.is_meta
    assert model.get_buffer("table").is_meta
    quantize_checkpoint(source, tmp_path / "small", Int8DynamicConfig(), model)
    with pytest.raises(ValueError, match="buffers 'table' are on 'meta' and in no file"):
        load(model, tmp_path / "small")
    assert model.body.weight.is_meta
    assert type(model.body) is nn.Linear
    model.table = torch.linspace(0, 1, 48)
    load(model, tmp_path / "small")
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))


def test_errors(tmp_path: Path) -> None:
    model = Writer()
    source = written(model, tmp_path / "float", 1)
    target, config = tmp_path / "small", Int8DynamicConfig()
    bad = copy.deepcopy(model)
    with torch.no_grad():
        bad.back.weight[40, 3] = float("nan")
    no_float = {"a.weight": torch.zeros(3, 3, dtype=torch.int32)}
    save_file(no_float, tmp_path / "integers")
    for arguments, error, message in (
        ((tmp_path, target, config), FileNotFoundError, "holds neither model.safetensors nor"),
        ((tmp_path / "none", target, config), FileNotFoundError, "none"),
        ((source, target, config, nn.Linear(3, 3)), ValueError, "no 'weight', which the model has"),
        ((source, target, config, None, lambda *_: True), ValueError, "needs model="),
        ((source, target, Int8DynamicConfig(method="gptq")), ValueError, "needs data"),
        ((source, target, "int8"), TypeError, "expected a configuration"),
        ((tmp_path / "integers", target, config), ValueError, "no matrix of floats"),
        ((written(bad, tmp_path / "bad", 1), target, config), ValueError, "'back.weight', in rows"),
        ((source, target, Int8DynamicConfig(embeddings=None), model, lambda _, n: n != "embed"),
         ValueError, "leave both out"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            quantize_checkpoint(*arguments)  # type: ignore[arg-type]
        assert not target.exists()
    assert not list(tmp_path.glob(".*unfinished"))


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from lowbit.cli import app

    model = Writer()
    source = written(model, tmp_path, 1)
    options = ["--config", "int4_weight_only", "--group-size", "16", "--json", "-"]
    command = ["quantize", str(source), "--out", str(tmp_path / "small.safetensors"), *options]
    done = CliRunner().invoke(app, [*command, "--model", f"{__name__}:Writer"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["bytes_after"] < told["bytes_before"]
    small = Writer()
    load(small, tmp_path / "small.safetensors")
    other = quantize_(copy.deepcopy(model), Int4WeightOnlyConfig(group_size=16))
    tokens = torch.arange(6)
    with torch.inference_mode():
        assert torch.equal(small.eval()(tokens), other.eval()(tokens))
    refused = CliRunner().invoke(app, [*command[:4], "--group-size", "16"])
    assert refused.exit_code == 2


EXPERTS = {
    "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Qwen2Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "shared_expert_intermediate_size": 16},
    "GptOss": {"num_local_experts": 3, "num_experts_per_tok": 2},
}  # fmt: skip


def mixture(kind: str) -> Any:
    """A model that chooses among experts, of transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, **EXPERTS[kind])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_mixture_is_read_again(kind: str, named: bool, tmp_path: Path) -> None:
    """Experts by number become the model's parameters; what chooses them stays floats."""
    model = mixture(kind)
    model.save_pretrained(tmp_path / "float")
    told = quantize_checkpoint(
        tmp_path / "float", tmp_path / "small", Int8DynamicConfig(), model if named else None
    )
    assert not [one.name for one in told.layers if one.quantized and "router" in one.name]
    found = load(mixture(kind), tmp_path / "small").state_dict()
    for name, want in model.state_dict().items():
        error = (found[name].float() - want).norm() / want.norm().clamp_min(1e-30)
        exact = "router" in name or "mlp.gate.weight" in name or (named and "experts." in name)
        assert error == 0 if exact else error < 0.02, name


def test_a_mixture_that_lacks_a_matrix(tmp_path: Path) -> None:
    model = mixture("Qwen3Moe")
    model.save_pretrained(tmp_path / "float")
    file = tmp_path / "float/model.safetensors"
    held = {name: one for name, one in load_file(file).items() if "experts.1.up_proj" not in name}
    save_file(held, file)
    with pytest.raises(ValueError, match="expert 1 is missing or lacks a matrix"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "small", Int8DynamicConfig(), model)
    quantize_checkpoint(tmp_path / "float", tmp_path / "small", Int8DynamicConfig())
    with pytest.raises(ValueError, match="expert 1 is missing or lacks a matrix"):
        load(model, tmp_path / "small")
