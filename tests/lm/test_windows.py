"""Known beginnings of prompts where tokens attend to so many others at most."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from lowbit.lm import LanguageModel

from .test_unread import CONFIG, tensors

WINDOW = 20
IDS = np.random.default_rng(1).integers(0, 40, 61).tolist()


@pytest.mark.deep  # kernels of attention are compiled
@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_logits_of_a_prompt_do_not_depend_on_what_was_known(cache, tmp_path):
    config = CONFIG | {"model_type": "mistral", "sliding_window": WINDOW, "head_dim": 32,
                       "hidden_size": 64, "num_hidden_layers": 1}  # fmt: skip
    rng = np.random.default_rng(0)
    held = {
        name: rng.standard_normal([4 * size if size in (8, 16) else size for size in a.shape])
        for name, a in tensors(1).items()
    }
    held = {name: (0.2 * array).astype(np.float32) for name, array in held.items()}
    safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm = LanguageModel.load(tmp_path, cache=cache, sequences=1, threads=1)
    rows = []
    for cut in (0, 8, 31, WINDOW + 9, len(IDS) - 1):
        with lm.sequence() as sequence:
            sequence.rewind(0)
            if cut:
                sequence.feed(IDS[:cut], prompt=True)
            rows.append(sequence.feed(IDS[cut:], prompt=True))
            sequence.rewind(0)
    np.testing.assert_array_equal(rows, rows[:1] * len(rows))
