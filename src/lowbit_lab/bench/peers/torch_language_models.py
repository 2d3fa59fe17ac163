"""Language models in PyTorch: transformers, and torchao's 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.lm.checkpoint import GgufCheckpoint, open_checkpoint
from lowbit.numerics.methods import QuantizedWeight
from lowbit_lab.bench.core.case import implementation
from lowbit_lab.bench.lm.contender import Array, Contender, Loaded, ModelWork

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_GROUP = 32
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def llama_of(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A GGUF file of a Llama as transformers has it, its weights as the numbers that they stand
    for. It is read by lowbit: transformers' own reader needs more packages, for the same numbers.

    NotImplementedError: the file holds another architecture."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    checkpoint = open_checkpoint(path)
    d = checkpoint.description
    if d.architecture != "llama" or d.scaling or not isinstance(checkpoint, GgufCheckpoint):
        raise NotImplementedError(f"{path} holds no Llama whose positions are not scaled")
    config = LlamaConfig(
        vocab_size=d.vocabulary, hidden_size=d.width, num_hidden_layers=d.layers,
        intermediate_size=checkpoint.metadata["llama.feed_forward_length"],
        num_attention_heads=d.heads, num_key_value_heads=d.key_heads, head_dim=d.head_dim,
        rms_norm_eps=d.epsilon, max_position_embeddings=d.context,
        rope_parameters={"rope_type": "default", "rope_theta": d.base},
        tie_word_embeddings="output.weight" not in checkpoint.names,
    )  # fmt: skip
    with torch.device("meta"):  # no memory for weights that are replaced
        model = LlamaForCausalLM(config)
    held = {
        name: torch.from_numpy(np.ascontiguousarray(_weight(checkpoint, name))).to(dtype)
        for name in model.state_dict()
        if not (config.tie_word_embeddings and name.startswith("lm_head"))
    }
    model.load_state_dict(held, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


def _weight(checkpoint: GgufCheckpoint, name: str) -> Array:
    stem, layer = name.removesuffix(".weight"), ""
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        layer = f"blk.{number}."
    stored = f"{layer}{_NAMES[stem]}.weight"
    if "norm" in stored:
        return checkpoint.vector(stored)
    weight = checkpoint.matrix(stored)
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


class _Torch(Contender):
    """A model of transformers, run eagerly. dtype: of its weights, but for those that are
    quantized."""

    needs = ("torch", "transformers")
    package = "transformers", "transformers"
    dtype = "bfloat16"

    def open(self, work: ModelWork) -> Loaded:
        import torch

        torch.set_num_threads(work.threads)
        return _Loaded(work, self.changed(llama_of(work.path, getattr(torch, self.dtype))))

    def changed(self, model: Any) -> Any:
        """The model as it is run."""
        return model


@implementation("lm", "float32", "bfloat16")
class Transformers(_Torch):
    """Floats."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.name = f"transformers {dtype.replace('loat', '')}"
        super().__init__()


@implementation("lm")
class Torchao(_Torch):
    """`PrototypeInt4WeightOnlyConfig`, which PyTorch's 4-bit product for CPUs serves."""

    name = "torchao int4"
    needs = (*_Torch.needs, "torchao")
    package = "torchao", "torchao"
    remark = f"weights rounded once more, to groups of {_GROUP}"

    def changed(self, model: Any) -> Any:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig  # pyright: ignore[reportMissingImports]
        from torchao.quantization import quantize_  # pyright: ignore[reportMissingImports]

        quantize_(model, PrototypeInt4WeightOnlyConfig(_GROUP, set_inductor_config=False))
        return model


def _nbytes(tensor: Any) -> int:
    """Of a tensor, or of those that stand for it."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])


class _Loaded(Loaded):
    def __init__(self, work: ModelWork, model: Any) -> None:
        super().__init__(work)
        self._model = model
        head = model.lm_head.weight
        kept = {id(head): head, **{id(p): p for p in model.model.layers.parameters()}}
        self.nbytes = sum(map(_nbytes, kept.values()))
        self.detail = f"cache: {model.dtype}".replace("torch.", "")

    def _run(self, tokens: Any, **options: Any) -> Array:
        import torch

        with torch.inference_mode():
            ids = torch.as_tensor(tokens)
            result = self._model(ids, past_key_values=self._cache, use_cache=True, **options)
            return result.logits.float().numpy()

    def _begin(self) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache()

    def prompt(self) -> Array:
        self._begin()
        return self._run(self.work.prompts, logits_to_keep=1)[:, -1]

    def rewind(self) -> None:
        more = self._cache.get_seq_length() - len(self.work.prompts[0])
        if more:
            self._cache.crop(-more)

    def step(self, tokens: Array) -> Array:
        return self._run(tokens[:, None])[:, -1]

    def logits(self) -> Array:
        self._begin()
        return self._run([self.work.prompts[0]])[0]
