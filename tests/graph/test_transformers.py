"""Transformers, as PyTorch's present exporter writes them, compute what ONNX Runtime computes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from lowbit.graph import Session, load, save
from lowbit.graph.onnx import from_onnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# One layer, which others would repeat; two where they differ or share their weights.
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip
_DECODER = {**_SIZES, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0}
_SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 99,
    "use_cache": False,
}  # fmt: skip
_IMAGE = {k: v for k, v in _SIZES.items() if k != "max_position_embeddings" and k != "vocab_size"}
_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99, "use_cache": False}
FAMILIES: dict[str, Mapping[str, Any]] = {
    "Albert": {**_SIZES, "num_hidden_layers": 2, "embedding_size": 16},
    "Bart": _SEQ2SEQ,
    "Bert": _SIZES,
    "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 99, "use_cache": False},
    "CLIP": {
        "text_config": {**_SIZES, "eos_token_id": 98},
        "vision_config": {**_IMAGE, "image_size": 16, "patch_size": 8},
    },
    "DistilBert": {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48, "vocab_size": 99},
    "Electra": {**_SIZES, "embedding_size": 16},
    "Falcon": {**_SIZES, "use_cache": False},
    "Gemma2": {
        **_DECODER, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 4,
        "query_pre_attn_scalar": 16,
    },
    "GPT2": _GPT2,
    "GPTNeoX": {**_SIZES, "use_cache": False},
    "Llama": _DECODER,
    "Mistral": {**_DECODER, "sliding_window": 4},
    "MPNet": _SIZES,
    "OPT": {
        "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1, "ffn_dim": 48,
        "num_attention_heads": 2, "vocab_size": 99, "use_cache": False,
    },
    "Phi3": _DECODER,
    "Qwen2": _DECODER,
    "Qwen3": {**_DECODER, "head_dim": 16},
    "Roberta": _SIZES,  # also XLM-RoBERTa, whose files have the same nodes
    "Swinv2": {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 2],
        "window_size": 4,
    },
    "Whisper": {
        **_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


# Of all files the sizes are left open. Where they are not, what is computed with them is constant:
# in networks of text of both kinds, of images, of sound, and of two inputs.
STATIC = ("Bert", "CLIP", "Gemma2", "Llama", "Swinv2", "Whisper")


def _inputs(family: str, batch: int, length: int) -> dict[str, np.ndarray]:
    """Numbers of tokens, of which the last sample has two less, or images or sounds."""
    rng = np.random.default_rng(batch * length)
    ids = rng.integers(3, 98, (batch, length))
    mask = np.ones_like(ids)
    mask[-1, -2:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    image = rng.normal(size=(batch, 3, 32, 32)).astype(np.float32)
    if family == "Whisper":
        sound = rng.normal(size=(batch, 8, 20)).astype(np.float32)
        return {"input_features": sound, "decoder_input_ids": ids}
    others = {
        "Bart": {**text, "decoder_input_ids": ids[:, 1:-1]},
        "CLIP": {"input_ids": ids, "pixel_values": image[..., :16, :16], "attention_mask": mask},
        "Swinv2": {"pixel_values": image},
    }
    return others.get(family, text)


def _exported(family: str, dynamic: bool) -> bytes:
    """A file with random weights; dynamic: with batch and length left open."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    network = getattr(transformers, f"{family}Model")(config).eval()
    names = [*_inputs(family, 2, 7)]

    class Output(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *args: Any) -> Any:
            outputs = self.network(**dict(zip(names, args, strict=True)))
            return outputs["logits_per_image" if family == "CLIP" else "last_hidden_state"]

    open_size = torch.export.Dim.DYNAMIC
    tokens = ("input_ids", "attention_mask", "decoder_input_ids")
    sizes = tuple({0: open_size, **({1: open_size} if n in tokens else {})} for n in names)
    args = tuple(map(torch.from_numpy, _inputs(family, 2, 7).values()))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Output(), args, file, input_names=names, dynamo=True, verbose=False,
            dynamic_shapes=(sizes,) if dynamic else None,
        )  # fmt: skip
    return file.getvalue()


@pytest.mark.drawn(9)
@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "dynamic"), [*((one, True) for one in FAMILIES), *((one, False) for one in STATIC)]
)
def test_a_transformer_is_what_onnx_runtime_computes(
    family: str, dynamic: bool, tmp_path: Any
) -> None:
    file = _exported(family, dynamic)
    graph = from_onnx(file)
    save(graph, tmp_path / "network")
    sessions = Session(graph, threads=1), Session(load(tmp_path / "network"), threads=1)
    theirs = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch, length in ((2, 7), (3, 11)) if dynamic else ((2, 7),):
        inputs = _inputs(family, batch, length)
        (expected,) = theirs.run(None, {name: inputs[name] for name in graph.inputs})
        for session in sessions:
            np.testing.assert_allclose(
                session(*(inputs[name] for name in graph.inputs)), expected, rtol=1e-4, atol=2e-5
            )
