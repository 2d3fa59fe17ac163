"""A real language model: what it says, its sequences, and what is refused."""

from __future__ import annotations

import threading
from typing import Any

import gguf
import numpy as np
import pytest
from language_models import smollm2

from lowbit.lm import LanguageModel, Sampling

PATH = smollm2()
# "What is the capital of France?" in the model's template.
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.


@pytest.fixture(scope="module")
def lm():
    return LanguageModel.load(PATH, context=128, sequences=4)


@pytest.fixture(scope="module")
def exact():
    """As near to the file's numbers as it comes."""
    return LanguageModel.load(PATH, context=128, activations="float", cache="float32")


def greedy(sequence, row, count):
    made = []
    for _ in range(count):
        made.append(int(row.argmax()))
        row = sequence.feed(made[-1:])
    return made


def test_it_answers(lm):
    with lm.sequence() as sequence:
        assert greedy(sequence, sequence.feed(QUESTION), len(ANSWER)) == ANSWER


@pytest.mark.deep
def test_logits_are_those_of_the_files_numbers(exact):
    """Against a Llama that is written out here, on what the package reads."""
    made, want = exact.logits(QUESTION), plain_logits(PATH, QUESTION)
    assert np.linalg.norm(made - want) / np.linalg.norm(want) < 1e-5


@pytest.mark.deep
def test_eight_bits_of_activations_cost_little(lm):
    """With a scale for each group of a token; one for each token is worse."""
    want = plain_logits(PATH, QUESTION)
    errors = [
        np.linalg.norm(one.logits(QUESTION) - want) / np.linalg.norm(want)
        for one in (lm, LanguageModel.load(PATH, context=64, activations="dynamic"))
    ]
    assert errors[0] < 0.04
    assert 2 * errors[0] < errors[1]


@pytest.mark.deep
def test_a_cache_of_bytes_costs_little(exact):
    """In chunks and in steps."""
    lm = LanguageModel.load(PATH, context=64, activations="float", cache="int8")
    want = exact.logits(QUESTION)
    made = lm.logits(QUESTION)
    assert np.linalg.norm(made - want) / np.linalg.norm(want) < 0.02
    with lm.sequence() as sequence:
        assert greedy(sequence, sequence.feed(QUESTION), len(ANSWER)) == ANSWER


def plain_logits(path, ids):
    """A Llama in NumPy on what the package reads."""
    reader = gguf.GGUFReader(path)
    tensors = {
        one.name: gguf.dequantize(one.data, one.tensor_type).reshape(one.shape[::-1])
        for one in reader.tensors
    }
    heads, keys, size = 9, 3, 64
    angles = np.arange(len(ids))[:, None] * 1e5 ** -(np.arange(32) / 32)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def turn(x):
        x = x.reshape(len(ids), -1, size)
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)

    x = tensors["token_embd.weight"][ids].astype(np.float64)
    for layer in range(30):
        t = {key: tensors[f"blk.{layer}.{key}.weight"] for key in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate",
            "ffn_up", "ffn_down")}  # fmt: skip
        y = norm(x, t["attn_norm"])
        q, k = turn(y @ t["attn_q"].T), np.repeat(turn(y @ t["attn_k"].T), heads // keys, 1)
        v = np.repeat((y @ t["attn_v"].T).reshape(len(ids), -1, size), heads // keys, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / 8
        scores[:, ~np.tri(len(ids), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(len(ids), -1) @ t["attn_output"].T
        y = norm(x, t["ffn_norm"])
        gate = y @ t["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ t["ffn_up"].T)) @ t["ffn_down"].T
    return norm(x, tensors["output_norm.weight"]) @ tensors["token_embd.weight"].T


@pytest.mark.deep
def test_steps_of_several_sequences_are_those_of_each(lm):
    alone, starts = [], (QUESTION, QUESTION[:5], QUESTION[2:9])
    for ids in starts:
        with lm.sequence() as sequence:
            alone.append(greedy(sequence, sequence.feed(ids), 6))
    with lm.sequence() as a, lm.sequence() as b, lm.sequence() as c:
        together = [a, b, c]
        rows = np.stack([one.feed(ids) for one, ids in zip(together, starts, strict=True)])
        made = [[], [], []]
        for _ in range(6):
            tokens = [int(row.argmax()) for row in rows]
            for text, token in zip(made, tokens, strict=True):
                text.append(token)
            rows = lm.step(together, tokens)
    assert made == alone


def test_what_begins_alike_is_not_computed_twice(exact):
    with exact.sequence() as sequence:
        want = sequence.feed(QUESTION)
    with exact.sequence(QUESTION) as sequence:
        assert sequence.ids == QUESTION[:-1]
        made = sequence.feed(QUESTION[-1:])
        assert np.linalg.norm(made - want) / np.linalg.norm(want) < 1e-5
    with exact.sequence([7, 8, 9]) as sequence:
        assert not sequence.ids


REPEAT = "Repeat: one two three four. one two three four. one two three four."


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.3, seed=4)])
def test_guesses_do_not_change_the_text(exact, sampling):
    plain, guessed = (
        exact.generate(REPEAT, max_tokens=60, sampling=sampling, speculate=count)
        for count in (0, 7)
    )
    assert "".join(plain) == "".join(guessed)
    assert guessed.accepted_tokens > 0


@pytest.mark.deep
def test_the_same_seed_draws_the_same_text(lm):
    """Also of a prompt that is known, and in another model of the file."""
    sampling, other = Sampling(temperature=1.5, seed=4), LanguageModel.load(PATH, context=128)
    texts = ["".join(one.generate(REPEAT, max_tokens=30, sampling=sampling))
             for one in (lm, lm, other, lm)]  # fmt: skip
    assert texts == texts[:1] * 4
    changed = Sampling(temperature=1.5, seed=5)
    assert "".join(lm.generate(REPEAT, max_tokens=30, sampling=changed)) != texts[0]


def test_logits_of_a_prompt_do_not_depend_on_what_was_known(lm):
    rows = []
    for cut in (0, 5, len(QUESTION) - 1):
        with lm.sequence() as sequence:
            if cut:
                sequence.feed(QUESTION[:cut], prompt=True)
            rows.append(sequence.feed(QUESTION[cut:], prompt=True))
            sequence.rewind(0)
    np.testing.assert_array_equal(rows, rows[:1] * 3)


def test_rows_are_the_logits_of_each_token(exact):
    want = exact.logits(QUESTION)
    with exact.sequence() as sequence:
        sequence.feed(QUESTION[:9])
        for count in (1, 5, 7):
            made = sequence.rows(QUESTION[9 : 9 + count])
            assert np.linalg.norm(made - want[9 : 9 + count]) < 1e-5 * np.linalg.norm(made)
            sequence.rewind(9)


def test_threads_that_generate_at_once(lm):
    made = {}

    def work(number):
        with lm.sequence() as sequence:
            made[number] = greedy(sequence, sequence.feed(QUESTION), len(ANSWER))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert list(made.values()) == [ANSWER] * 4


def test_a_context_that_is_full(lm):
    with lm.sequence() as sequence:
        with pytest.raises(ValueError, match="0 tokens and 129 more do not fit the context of 128"):
            sequence.feed([1] * 129)
        sequence.feed([1] * 127)
        sequence.feed([5])
        with pytest.raises(ValueError, match="128 tokens and 1 more"):
            sequence.feed([5])
        assert sequence.length == 128


def test_what_is_refused(lm, tmp_path):
    with lm.sequence() as sequence:
        with pytest.raises(ValueError, match="no tokens"):
            sequence.feed([])
        with pytest.raises(ValueError, match="0 to 49151, not 49152"):
            sequence.feed([49152])
        with pytest.raises(ValueError, match="different"):
            lm.step([sequence, sequence], [1, 1])
    opened = [lm.sequence() for _ in range(4)]
    with pytest.raises(RuntimeError, match="4 sequences are open"):
        lm.sequence()
    for one in opened:
        one.close()
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"context": 9000}, "8192"), ({"activations": "int8"}, "activations"),
        ({"cache": "float16"}, "cache"), ({"sequences": 0}, "sequences"),
    )  # fmt: skip
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            LanguageModel.load(PATH, **given)
    with pytest.raises(FileNotFoundError):
        LanguageModel.load(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="no config"):
        LanguageModel.load(tmp_path)


def test_perplexity(lm):
    ids = QUESTION * 3
    rows = lm.logits(ids)[:-1].astype(np.float64)
    chosen = rows[np.arange(len(rows)), ids[1:]] - np.log(np.exp(rows).sum(-1))
    assert lm.perplexity(ids) == pytest.approx(np.exp(-chosen.mean()), rel=1e-6)
    with pytest.raises(ValueError, match="two tokens"):
        lm.perplexity([1])
