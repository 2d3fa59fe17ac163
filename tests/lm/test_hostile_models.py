"""GGUF files whose metadata and tensors contradict each other: an error names what is wrong, before
memory of that size is taken."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lowbit.lm import LanguageModel
from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.description import Description

from .test_architectures import CASES, COMMON, random_model
from .test_gguf_architectures import WRITTEN, stacked, write

TENSORS = {
    "blk.0.ffn_gate_inp.weight": lambda a: np.concatenate([a, a]),  # wrote outside of its memory
    "blk.1.ffn_up_exps.weight": lambda a: a[:, :-2],
    "blk.0.ffn_down_exps.weight": lambda a: a[:, :-2],
    "blk.0.attn_q.weight": lambda a: a[:-8],
    "blk.0.attn_output.weight": lambda a: a[:, :-8],
    "blk.0.attn_norm.weight": lambda a: a[:1],  # was spread over all
    "blk.1.ffn_norm.weight": lambda a: a[:-1],
    "output_norm.weight": lambda a: a[:-1],
    "token_embd.weight": lambda a: a[:-1],
}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    random_model("mixtral", folder)
    return folder


def written(path, folder, layout=stacked, **more):
    kind, usual = WRITTEN["mixtral"]
    write(path, folder, kind, {**usual, **more}, {**COMMON, **CASES["mixtral"][1]}, layout)
    return path


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_another_shape_is_named(name, mixtral, tmp_path):
    def layout(stem, value, tensors):
        tensors[stem] = TENSORS[stem](value) if stem == name else value

    path = written(tmp_path / "model.gguf", mixtral, layout)
    with pytest.raises(ValueError, match=rf"{name} has .*(expected|is none)"):
        LanguageModel.load(path)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("block_count", 1, "has 4 layers; 1 are described"),
    ("block_count", 65_000, "has 4 layers; 65000 are described"),
    ("attention.head_count_kv", 4, "attn_. has|attn_..weight has"),
    ("vocab_size", 1 << 30, "token_embd.weight has 300 rows"),
])  # fmt: skip
def test_sizes_that_tensors_do_not_have(key, value, message, mixtral, tmp_path):
    path = written(tmp_path / "model.gguf", mixtral, **{key: value})
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(path)


PLAIN = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
    "llama.attention.head_count": 4, "llama.context_length": 128, "llama.vocab_size": 300,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), [
    ("layers", "block_count", (1 << 32) - 1), ("rotated", "rope.dimension_count", "x"),
    ("epsilon", "attention.layer_norm_rms_epsilon", float("nan")),
    ("base", "rope.freq_base", float("inf")), ("base", "rope.freq_base", "x"),
    ("experts", "expert_count", 1.5),
])  # fmt: skip
def test_a_number_that_is_none_is_named(name, key, value):
    assert Description.of_gguf(PLAIN).layers == 2
    with pytest.raises(ValueError, match=f"{name} must be"):
        Description.of_gguf(PLAIN | {f"llama.{key}": value})


def of(name):
    """The plain description under another name."""
    renamed = {key.replace("llama.", f"{name}."): value for key, value in PLAIN.items()}
    return renamed | {"general.architecture": name}


def test_a_cap_that_is_none_is_named():
    with pytest.raises(ValueError, match="attention_cap must be"):
        Description.of_gguf(of("gemma2") | {"gemma2.attn_logit_softcapping": [1.0]})


def test_a_0_that_is_divided_by(mixtral, tmp_path):
    path = written(tmp_path / "model.gguf", mixtral, **{"attention.head_count": 0})
    with pytest.raises(ValueError, match=r"model\.gguf.*division"):
        LanguageModel.load(path)
    with pytest.raises(ZeroDivisionError):
        Description.of_gguf(of("granite") | {"granite.logit_scale": 0.0})


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope.dimension_count": 1 << 30}, "of 16 elements of a head cannot turn"),
    ({"rope.dimension_count": 3}, "3 of 16 elements"),
])  # fmt: skip
def test_what_contradicts_is_named(changes, message):
    given = PLAIN | {f"llama.{key}": value for key, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        Description.of_gguf(given)


@pytest.mark.parametrize(("kind", "part"), [
    ("linear", "factor"), ("llama3", "low_freq_factor"), ("longrope", "short_factor"),
])  # fmt: skip
def test_a_part_of_a_scaling_that_is_missing_is_named(kind, part):
    description = Description.of_gguf(PLAIN | {"llama.rope.scaling.type": kind})
    with pytest.raises(ValueError, match=f"no {part}"):
        description.frequencies(128)


def test_an_architecture_that_is_no_name():
    with pytest.raises(NotImplementedError, match="are not served"):
        Description.of_gguf({"general.architecture": ["llama"]})


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.3.ffn_norm.weight"])
def test_a_norm_that_is_missing_is_named(name, mixtral, tmp_path):
    """Without it the layer would compute on."""

    def layout(stem, value, tensors):
        if stem != name:
            tensors[stem] = value

    path = written(tmp_path / "model.gguf", mixtral, layout)
    layer, _, rest = name.rpartition("attn" if "attn" in name else "ffn")
    with pytest.raises(ValueError, match=rf"{layer[:-1]} of .* has no .*{rest}"):
        LanguageModel.load(path)


CONFIG = {
    "model_type": "smollm3", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 6,
    "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "llama", "hidden_act": "gelu"}, "llama with hidden_act 'gelu'"),
    ({"model_type": "gemma2", "hidden_activation": "relu"}, "gemma2 with hidden_activation 'relu'"),
    ({"no_rope_layers": [0, 1, 1, 1, 0, 1]}, "layers without positions"),
])  # fmt: skip
def test_a_config_that_is_not_served_says_so(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        Description.of_config({**CONFIG, **changes})


def test_layers_that_do_not_turn_are_those_of_the_config():
    assert Description.of_config(CONFIG).straight == 4
    every = {"no_rope_layer_interval": 3, "no_rope_layers": [1, 1, 0, 1, 1, 0]}
    assert Description.of_config({**CONFIG, **every}).straight == 3


@pytest.mark.parametrize("factor", [0, -1.0, "8", float("inf")])
def test_a_factor_of_positions_that_is_none_is_named(factor):
    scaling = {"rope_scaling": {"rope_type": "yarn", "factor": factor}}
    with pytest.raises(ValueError, match="factor must be a positive number"):
        Description.of_config({**CONFIG, "model_type": "llama", **scaling})


@pytest.mark.parametrize("changes", [{"rope_scaling": 3}, {"hidden_size": "64"}])
def test_a_config_of_other_types_is_refused(changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama", **changes}))
    with pytest.raises(ValueError, match=r"sizes, factors or names in it are none|must be"):
        LanguageModel.load(tmp_path)


def test_mutated_files_are_named(tmp_path):
    """Whatever a byte does: a file is read, or an error of a few kinds says which it was."""
    from .test_unread import written as plain

    data = plain(tmp_path / "whole.gguf").read_bytes()
    header = data.rindex(b"blk.1.ffn_norm") + 64
    rng = np.random.default_rng(0)
    path = tmp_path / "mutated.gguf"
    errors = list[str]()
    for _ in range(300):
        changed = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            changed[at] = int(rng.choice([0, 1, 8, 9, 27, 127, 255, int(rng.integers(0, 256))]))
        path.write_bytes(changed)
        try:
            open_checkpoint(path)
        except (ValueError, NotImplementedError, MemoryError) as error:
            errors.append(str(error).replace("\n", ""))
    assert len(errors) > 100
    assert all("mutated.gguf" in error and error.isprintable() for error in errors)


def test_names_from_files_are_escaped(tmp_path):
    from .test_unread import written as plain

    path = plain(tmp_path / "model.gguf", more=[("blk.0.\x1b[2Jü\u202e\x9b1m", (64,))])
    with pytest.raises(NotImplementedError) as raised:
        open_checkpoint(path)
    assert r"blk.0.\x1b[2Jü\u202e\x9b1m" in str(raised.value)
