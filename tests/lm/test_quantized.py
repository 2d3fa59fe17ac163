"""Folders of transformers that others quantized, written here as their formats are documented."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from lowbit.lm import LanguageModel
from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.network import Weights
from lowbit.numerics import QTensor, int_format
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights import folder
from lowbit.weights.format import WeightFormat

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

IDS = np.random.default_rng(1).integers(0, 300, 40).tolist()
LEFT_OUT = "model.layers.1.mlp.down_proj"  # and the head, which stay floats


def words(values, bits, axis):
    """Neighbours along an axis in words of 32 bits, the first in the lowest."""
    values, count = np.moveaxis(np.asarray(values), axis, 0), 32 // bits
    made = np.zeros((-(-len(values) // count), *values.shape[1:]), np.uint32)
    for i, row in enumerate(values):
        made[i // count] |= row.astype(np.uint32) << np.uint32(bits * (i % count))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(made, 0, axis)).view(np.int32))


def quantized(rng, w, bits, groups, symmetric, dtype=torch.float16):
    """q and zero, from 0 on, and scale: of [N, K], whose columns are in these groups [K]."""
    count = groups.max() + 1
    parts = [np.abs(w[:, groups == g]).max(1) for g in range(count)]
    scale = torch.from_numpy(np.stack(parts, 1) / 2 ** (bits - 1) * 1.1).to(dtype)
    scale[::5, 0] = -scale[::5, 0]  # as some write where the largest is positive
    scale[3, -1] = 0
    zero = np.full((len(w), count), 2 ** (bits - 1))
    if not symmetric:
        zero = rng.integers(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 3, zero.shape)
        zero[1, 0], zero[2, 0] = 0, 2**bits - 1
    s = scale.double().numpy()[:, groups]
    s = np.where(s == 0, np.inf, s)
    q = np.clip(np.rint(w / s) + zero[:, groups], 0, 2**bits - 1).astype(int)
    return q, zero, scale


def definition(q, zero, scale, groups):
    return (scale.double().numpy()[:, groups] * (q - zero[:, groups])).astype(np.float32)


def gptq(rng, w, order, bits=4, size=32, symmetric=True, less=1, act_order=False, own=False):
    depth = w.shape[1]
    groups = np.arange(depth) // (depth if size == -1 else size)
    if act_order:
        groups = (rng if own else order).permutation(groups)
    q, zero, scale = quantized(rng, w, bits, groups, symmetric)
    ones = words(np.full(zero.T.shape, less), bits, 1)
    return {
        "qweight": words(q.T, bits, 0), "qzeros": words(zero.T, bits, 1) - ones,
        "scales": scale.T.contiguous(), "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }, definition(q, zero, scale, groups)  # fmt: skip


def awq(rng, w, order, size=32):
    groups = np.arange(w.shape[1]) // size
    q, zero, scale = quantized(rng, w, 4, groups, False)

    def packed(values):
        columns = [8 * word + i for word in range(values.shape[1] // 8)
                   for i in (0, 2, 4, 6, 1, 3, 5, 7)]  # fmt: skip
        return words(values[:, columns], 4, 1)

    return {
        "qweight": packed(q.T), "qzeros": packed(zero.T), "scales": scale.T.contiguous(),
    }, definition(q, zero, scale, groups)  # fmt: skip


def packed(rng, w, order, bits=4, size=0, symmetric=True, act_order=False):
    groups = np.arange(w.shape[1]) // (size or w.shape[1])
    if act_order:
        groups = order.permutation(groups)
    q, zero, scale = quantized(rng, w, bits, groups, symmetric, torch.bfloat16)
    parts = {
        "weight_packed": words(q, bits, 1), "weight_shape": torch.tensor(w.shape),
        "weight_scale": scale,
    }  # fmt: skip
    if not symmetric:
        parts["weight_zero_point"] = words(zero, bits, 0)
    if act_order:
        parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, definition(q, zero, scale, groups)


def in_bytes(rng, w, order, bits=8, size=0, symmetric=True, each=True):
    groups = np.arange(w.shape[1]) // (size or w.shape[1])
    q, zero, scale = quantized(rng, w, bits, groups, symmetric, torch.float32)
    if not each:  # one scale for all
        scale = scale.abs().max().reshape(1)
    middle = 2 ** (bits - 1)
    parts = {"weight": torch.from_numpy((q - middle).astype(np.int8)), "weight_scale": scale}
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy((zero - middle).astype(np.int8))
    return parts, definition(q, zero, scale.expand(zero.shape), groups)


def float8(rng, w, order, each=True):
    top = np.abs(w).max(1, keepdims=True) if each else np.abs(w).max().reshape(1)
    scale = torch.from_numpy(top / 448).float()
    values = (torch.from_numpy(w) / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, (values.float() * scale).numpy()


def bitsandbytes(rng, w, order):
    top = np.abs(w).max(1)
    q = np.rint(w * (127 / top[:, None])).astype(np.int8)
    return {
        "weight": torch.from_numpy(q), "SCB": torch.from_numpy(top),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }, q * (top[:, None] / np.float32(127))  # fmt: skip


def words_config(method, **more):
    return {"quant_method": method, "bits": 4, "group_size": 32} | more


def compressed(form, kind="int", bits=4, **more):
    weights = {"type": kind, "num_bits": bits, "strategy": "group", "symmetric": True} | more
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head", LEFT_OUT],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def lowbit(rng, w, order, dtype="uint4", size: Any = 32, method="nearest", groups=False):
    """Rows as weights/folder.py defines them. groups: of int8, with real zero points."""
    if groups and size is not None:
        scale = np.abs(w.reshape(len(w), -1, size)).max(-1) / 90
        zero = rng.uniform(-30, 30, scale.shape).astype(np.float32)
        q = np.clip(np.rint(w / np.repeat(scale, size, 1) + np.repeat(zero, size, 1)), -128, 127)
        near = np.rint(zero).astype(np.int32)
        whole = QTensor(q.astype(np.int8), scale, near, int_format("int8"), 0, size)
        record = QuantizedWeight(whole, zero)
    else:
        record = WeightFormat(dtype, size, method=method).quantize(w)
    parts = {name: torch.from_numpy(one) for name, one in folder.to_tensors(record).items()}
    return parts, record.dequantize()


LOWBIT = folder.CONFIG
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
V2 = {"checkpoint_format": "gptq_v2", "desc_act": True}
# Writer, configuration, and the bits that are left.
CASES = {
    "gptq": (gptq, words_config("gptq", sym=True), 4),
    "gptq, zero points": (partial(gptq, symmetric=False), words_config("gptq", sym=False), 4),
    "gptq v2": (partial(gptq, symmetric=False, less=0), words_config("gptq", **V2), 4),
    "gptq, act-order": (partial(gptq, act_order=True), words_config("gptq", desc_act=True), 4),
    "gptq v2, act-order, each its own": (
        partial(gptq, act_order=True, own=True, less=0, symmetric=False),
        words_config("gptq", **V2), 4),
    "gptq, a shorter group": (
        partial(gptq, size=64, act_order=True), words_config("gptq", group_size=64), 4),
    "gptq, no groups": (partial(gptq, size=-1), words_config("gptq", group_size=-1), 4),
    "gptq, 8 bits": (
        partial(gptq, bits=8, symmetric=False, act_order=True), words_config("gptq", bits=8), 8),
    "gptq, 8 bits, no groups": (
        partial(gptq, bits=8, size=-1, symmetric=False),
        words_config("gptq", bits=8, group_size=-1), 8),
    "awq": (awq, words_config("awq", version="GEMM", zero_point=True), 4),
    "packed": (partial(packed, size=32), compressed(PACKED), 4),
    "packed, zero points": (
        partial(packed, size=32, symmetric=False), compressed(PACKED, symmetric=False), 4),
    "packed, act-order": (partial(packed, size=32, act_order=True), compressed(PACKED), 4),
    "packed, rows": (packed, compressed(PACKED, strategy="channel"), 4),
    "packed, 8 bits": (
        partial(packed, size=32, bits=8, symmetric=False), compressed(PACKED, bits=8), 8),
    "bytes": (in_bytes, compressed(INT, bits=8, strategy="channel"), 8),
    "bytes, zero points": (
        partial(in_bytes, symmetric=False), compressed(INT, bits=8, strategy="channel"), 8),
    "bytes, one scale": (
        partial(in_bytes, each=False), compressed(INT, bits=8, strategy="tensor"), 8),
    "4 bits in bytes": (partial(in_bytes, bits=4, size=32, symmetric=False), compressed(INT), 4),
    "float8": (float8, compressed(FLOAT, "float", 8, strategy="channel"), 0),
    "float8, one scale": (
        partial(float8, each=False), compressed(FLOAT, "float", 8, strategy="tensor"), 0),
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    "lowbit": (lowbit, LOWBIT, 4),
    "lowbit, a shorter group": (partial(lowbit, size=48), LOWBIT, 4),
    "lowbit, rows": (partial(lowbit, size=None), LOWBIT, 4),
    "lowbit, symmetric": (partial(lowbit, dtype="int4"), LOWBIT, 4),
    "lowbit, real zero points": (partial(lowbit, method="hqq"), LOWBIT, 4),
    "lowbit, 8 bits": (partial(lowbit, dtype="int8"), LOWBIT, 8),
    "lowbit, 8 bits in groups": (partial(lowbit, groups=True), LOWBIT, 8),
}  # fmt: skip


def written(folder, name, spoil=None, layers="proj", **more):
    """A random llama in a format, and transformers' float model with the numbers it stands for.

    spoil: changes the tensors. layers: what the names of those have that are quantized."""
    write, config, _ = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.15, attention_bias=True,
    )).eval()  # fmt: skip
    rng, state = np.random.default_rng(0), {}
    for key, value in model.state_dict().items():
        stem = key.removesuffix(".weight")
        if "bias" in key:
            value.normal_()
        if layers not in stem or stem in (LEFT_OUT, key):
            state[key] = value
            continue
        place = [ord(letter) for letter in stem.rpartition(".")[0]]  # which has its own inputs
        order = np.random.default_rng([*place, value.shape[1]])
        parts, values = write(rng, value.numpy(), order)
        state |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
        value.copy_(torch.from_numpy(values))
    if spoil is not None:
        spoil(state)
    folder.mkdir(exist_ok=True)
    safetensors_torch.save_file(state, folder / "model.safetensors")
    described = model.config.to_dict() | {"quantization_config": config | more}
    (folder / "config.json").write_text(json.dumps(described, default=str))
    return model


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_the_format_defines(name, tmp_path):
    model = written(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    for ours, theirs in (("attn_q", "self_attn.q_proj"), ("attn_v", "self_attn.v_proj"),
                         ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj")):  # fmt: skip
        want = model.get_parameter(f"model.layers.0.{theirs}.weight").detach().numpy()
        weight = checkpoint.matrix(f"blk.0.{ours}.weight")
        assert not isinstance(weight, np.ndarray)
        made, order = weight.dequantize(), checkpoint.order(f"blk.0.{ours}.weight")
        if order is not None:
            made[:, order] = made.copy()
        bits = CASES[name][2]
        if bits:
            assert weight.weight.format.bits == bits
            assert (made == want).all()
        else:
            half = np.abs(want).max(1, keepdims=True) / 254
            assert (np.abs(made - want) <= half * 1.001).all()
    assert isinstance(checkpoint.matrix("blk.1.ffn_down.weight"), np.ndarray)


@pytest.mark.deep("gptq, 8 bits, no groups", "lowbit, 8 bits in groups", "lowbit, rows")
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_floats(name, tmp_path):
    model = written(tmp_path, name)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0].numpy()
    lm = LanguageModel.load(tmp_path, activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS) - want).max() / np.abs(want).max()
    weight = open_checkpoint(tmp_path).matrix("blk.0.attn_q.weight")
    assert not isinstance(weight, np.ndarray)
    # Without groups, activations have 8 bits in any case.
    assert error < (1e-5 if weight.weight.group_size else 0.1)
    rounded = sum(lm.notes.values())
    weights = sum(p.numel() for key, p in model.named_parameters() if key.endswith("proj.weight"))
    assert rounded == (weights - 64 * 160 if name.startswith("float8") else 0)
    if rounded:
        assert all("relative error 0." in reason for reason in lm.notes)


@pytest.mark.parametrize(("name", "products"), [
    ("gptq", 1), ("gptq, act-order", 1), ("gptq v2, act-order, each its own", 3),
])  # fmt: skip
def test_layers_that_share_an_order_are_one(name, products, tmp_path):
    written(tmp_path, name)
    weights = Weights(open_checkpoint(tmp_path), "float", None)
    made = weights.matrices([f"blk.0.attn_{part}" for part in "qkv"], [64, 32, 32], 64)
    assert len(made) == products
    orders = [weights.constants[order] for _, _, order in made if order]
    assert len(orders) == (0 if name == "gptq" else products)
    assert all(sorted(np.asarray(order)) == list(range(64)) for order in orders)


Q = "model.layers.0.self_attn.q_proj."


def cut(part):
    return lambda state: state.update({Q + part: state[Q + part][:-1].contiguous()})


def put(part, index, value):
    def spoil(state):
        state[Q + part][index] = value

    return spoil


@pytest.mark.parametrize(("name", "spoil", "message"), [
    ("gptq", cut("scales"), r"attn_q: scales must be float16 .*\[2, 64\], got float16 \[1, 64\]"),
    ("gptq", cut("qweight"), "attn_q: g_idx must be"),
    ("gptq", cut("qzeros"), "attn_q: qzeros must be"),
    ("gptq", lambda state: state.pop(Q + "scales"), "attn_q: it has no scales"),
    ("gptq", put("g_idx", 5, 7), "attn_q: g_idx must give 32 inputs to each group"),
    ("gptq", put("g_idx", 5, -1), "attn_q: g_idx must give 32 inputs to each group"),
    ("gptq", put("scales", (1, 3), np.nan), "attn_q: .*scales that are positive and finite"),
    ("gptq", lambda state: state.update({Q + "qweight": state[Q + "qweight"].long()}),
     "attn_q: qweight must be int32"),
    ("awq", cut("qweight"), r"attn_q.weight has the shape \[64, 63\]"),
    ("awq", cut("scales"), "attn_q: scales must be"),
    ("awq", cut("qzeros"), "attn_q: qzeros must be"),
    ("packed", put("weight_shape", 1, 80), r"attn_q: weight_shape \[64, 80\] does not fit"),
    ("packed", put("weight_shape", 1, -64), "attn_q: weight_shape"),
    ("packed", cut("weight_packed"), "attn_q: weight_shape"),
    ("packed", cut("weight_scale"), "attn_q: weight_scale must be"),
    ("packed, zero points", cut("weight_zero_point"), "attn_q: weight_zero_point must be"),
    ("bytes", cut("weight_scale"), "attn_q: weight_scale must be"),
    ("bytes", lambda state: state.pop(Q + "weight_scale"),
     "attn_q.weight must be floats, got int8"),
    ("bitsandbytes", cut("SCB"), "attn_q: SCB must be"),
    ("float8", put("weight_scale", (0, 0), np.inf), "attn_q: .*"),
    ("lowbit", cut("weight_values"), r"attn_q: weight_values must be .*\[64, -1\], got uint8 \[63"),
    ("lowbit", cut("weight_scale"), r"attn_q: weight_scale must be float32 \[64, 2\]"),
    ("lowbit", cut("weight_zero_point"), "attn_q: weight_zero_point must be uint8 or float32"),
    ("lowbit", cut("weight_sizes"), r"attn_q: weight_sizes must be int64 \[3\]"),
    ("lowbit", lambda state: state.pop(Q + "weight_scale"), "attn_q: it has no weight_scale"),
    ("lowbit", put("weight_sizes", 1, 80), r"weight_scale must be|weight_values must be"),
    ("lowbit", put("weight_sizes", 2, 0), r"weight_sizes must be N, K and a size up to K"),
    ("lowbit", put("weight_scale", (1, 1), 0), "attn_q: .*scales that are positive and finite"),
    ("lowbit", put("weight_zero_point", (1, 1), 16), "attn_q: .*zero_point"),
    ("lowbit, real zero points", put("weight_zero_point", (1, 1), np.nan),
     "attn_q: weight_zero_point must be finite"),
    ("lowbit, 8 bits", put("weight_scale", (1, 0), -1), "attn_q: .*positive and finite"),
])  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(name, spoil, message, tmp_path):
    written(tmp_path, name, spoil)
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(tmp_path)


GROUP = {"weights": {"type": "int", "num_bits": 3, "strategy": "group"}}
BLOCK = {"weights": {"type": "float", "num_bits": 8, "strategy": "block"}}


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("gptq", {"quant_method": "hqq"}, "'hqq' are not read.*'gptq', 'awq'"),
    ("gptq", {"bits": 3}, "bits 3"),
    ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
    ("gptq", {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}}, "dynamic.*up"),
    ("awq", {"version": "gemv"}, "'gemv'"),
    ("packed", {"format": "nvfp4-pack-quantized"}, "nvfp4"),
    ("packed", {"config_groups": {"group_0": GROUP}}, "'int', 3"),
    ("packed", {"config_groups": {"group_0": BLOCK}}, "'block'"),
    ("packed", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    ("bitsandbytes", {"load_in_8bit": False, "load_in_4bit": True}, "load_in_8bit"),
    ("lowbit", {"format_version": 3}, "format_version 3 are not read; read are 1, 2"),
])  # fmt: skip
def test_what_is_not_read_is_named_before_weights_are(name, changes, message, tmp_path):
    written(tmp_path, name, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotImplementedError, match=message):
        LanguageModel.load(tmp_path)


def test_a_configuration_that_is_wrong(tmp_path):
    written(tmp_path, "gptq", group_size=0)
    with pytest.raises(ValueError, match="group_size must be positive or -1, got 0"):
        LanguageModel.load(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": [1]}))
    with pytest.raises(ValueError, match="quantization_config must be an object"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("name", ["packed", "gptq, act-order"])
def test_a_head_that_is_quantized(name, tmp_path):
    model = written(tmp_path, name, layers="lm_head")
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0].numpy()
    lm = LanguageModel.load(tmp_path, activations="float", cache="float32", threads=1)
    assert np.abs(lm.logits(IDS) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.deep
def test_steps_are_the_chunk_with_an_order(tmp_path):
    written(tmp_path, "gptq v2, act-order, each its own")
    lm = LanguageModel.load(tmp_path, cache="float32", threads=2)
    want = lm.logits(IDS)
    with lm.sequence() as sequence:
        rows = [sequence.feed(IDS[:20]), *(sequence.feed([token]) for token in IDS[20:])]
    assert np.abs(np.stack(rows) - want[19:]).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("lowbit")])
def test_embeddings_of_lowbit_and_a_head_that_shares_them(name, tmp_path):
    model = written(tmp_path, name, lambda state: state.pop("lm_head.weight"), layers="embed")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    table = model.model.embed_tokens.weight.detach()
    model.lm_head.weight.data.copy_(table)
    assert (open_checkpoint(tmp_path).rows("token_embd.weight", IDS) == table[IDS].numpy()).all()
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0].numpy()
    lm = LanguageModel.load(tmp_path, activations="float", cache="float32", threads=1)
    error = np.abs(lm.logits(IDS) - want).max() / np.abs(want).max()
    assert error < (0.05 if name == "lowbit, 8 bits" else 1e-5)  # whose activations have 8 bits


def test_inputs_that_are_divided_are_refused(tmp_path):
    def spoil(state):
        state[Q + "weight_input_scale"] = torch.ones(64)

    written(tmp_path, "lowbit", spoil)
    with pytest.raises(NotImplementedError, match=r"blk.0.attn_q: inputs that are divided"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_of_lowbit(kind, tmp_path):
    """As transformers saves them: each on its own. Some stay floats, all of a layer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.15, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=96, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    state = safetensors_torch.load_file(tmp_path / "model.safetensors")
    floats, parts = dict(state), {}
    for name, value in state.items():
        if "experts.0.w1" in name or ("layers.0" in name and "experts." in name):
            made, values = lowbit(None, value.numpy(), None)
            stem = name.removesuffix("weight")
            parts |= {f"{stem}{part}": one for part, one in made.items()}
            floats[name] = torch.from_numpy(values)
        else:
            parts[name] = value
    described = json.loads((tmp_path / "config.json").read_text())
    for folder_name, tensors, more in (("a", floats, {}), ("b", parts, LOWBIT)):
        (tmp_path / folder_name).mkdir()
        safetensors_torch.save_file(tensors, tmp_path / folder_name / "model.safetensors")
        text = json.dumps(described | ({"quantization_config": more} if more else {}))
        (tmp_path / folder_name / "config.json").write_text(text)
    want = LanguageModel.load(tmp_path / "a", cache="float32", threads=1).logits(IDS)
    if kind == "Mixtral":  # one expert of the second layer, and not the others
        with pytest.raises(ValueError, match=r"blk.1.ffn_gate_exps.*quantized in one way"):
            LanguageModel.load(tmp_path / "b")
        return
    made = LanguageModel.load(tmp_path / "b", activations="float", cache="float32", threads=1)
    assert np.abs(made.logits(IDS) - want).max() <= 1e-5 * np.abs(want).max()


def test_embeddings_are_floats(tmp_path):
    def spoil(state):
        state["model.embed_tokens.weight_scale"] = torch.ones(300, 1)

    written(tmp_path, "bytes", spoil)
    with pytest.raises(NotImplementedError, match="embeddings"):
        LanguageModel.load(tmp_path)
