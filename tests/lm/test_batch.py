"""Prompts that a real model answers together."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from language_models import smollm2

from lowbit.lm import LanguageModel, Sampling

PROMPTS = (
    "What is the capital of France?", "Name three colours.", "Hi", "Say hello in Spanish.",
    "What is two plus three?", "What do bees make?",
)  # fmt: skip
LONG = "Read this list: " + ", ".join(map(str, range(150)))  # several chunks


@pytest.fixture(scope="module")
def lm():
    """Without activations of 8 bits, where the last bits of sums decide how some are rounded."""
    return LanguageModel.load(
        smollm2(), context=1024, sequences=4, activations="float", cache="float32", threads=2
    )


deep_fixtures = ("alone",)


@pytest.fixture(scope="module")
def alone(lm):
    """The texts of the prompts, each by itself."""
    return {prompt: "".join(lm.generate(prompt, max_tokens=12)) for prompt in (*PROMPTS, LONG)}


@pytest.mark.deep
def test_texts_together_are_those_of_each(lm, alone):
    """More than the model has sequences for: some wait."""
    prompts = (*PROMPTS[:2], LONG, *PROMPTS[2:])
    streams = lm.generate_many(prompts, max_tokens=12)
    assert [("".join(stream)) for stream in streams] == [alone[one] for one in prompts]
    for stream in streams:
        figures = stream.figures()
        assert figures["reason"] in ("end", "length")
        assert figures["text_tokens_per_second"] > 0
        assert figures["prompt_tokens_per_second"] > 0
    assert sorted(lm._free) == [0, 1, 2, 3]


@pytest.mark.deep
def test_a_common_beginning_is_computed_once(lm):
    """What sequences that ended know is forgotten first, so that it can't serve."""
    system = {"role": "system", "content": f"Answer in a word. {LONG}"}
    chats = [[system, {"role": "user", "content": prompt}] for prompt in (*PROMPTS[:4], "Hi there")]
    expected = []
    for chat in chats:
        lm._known |= {slot: [] for slot in lm._known}
        expected.append("".join(lm.generate(chat, max_tokens=3)))
    lm._known |= {slot: [] for slot in lm._known}
    streams = lm.generate_many(chats, max_tokens=3)
    assert ["".join(stream) for stream in streams] == expected
    assert streams[0].known_tokens == 0
    shared = len(lm.tokenizer.encode(LONG))
    assert all(shared < one.known_tokens < one.prompt_tokens for one in streams[1:])


@pytest.mark.deep
@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_a_copied_beginning_changes_no_bits(cache):
    lm = LanguageModel.load(smollm2(), context=256, sequences=3, cache=cache, threads=2)
    ids = lm.tokenizer.encode(LONG)[:200]
    with lm.sequence() as first, lm.sequence() as second, lm.sequence() as third:
        first.feed([*ids[:150], 7, 8, 9], prompt=True)
        second.feed(ids[:3], prompt=True)
        second.copy(first, 150)
        assert second.ids == ids[:150]
        copied = second.feed(ids[150:], prompt=True)
        np.testing.assert_array_equal(copied, third.feed(ids, prompt=True))
        np.testing.assert_array_equal(second.feed([5]), third.feed([5]))


@pytest.mark.deep
def test_steps_are_shared(lm, alone, monkeypatch):
    counts, step = [], LanguageModel.step

    def counted(self, sequences, ids):
        counts.append(len(ids))
        return step(self, sequences, ids)

    monkeypatch.setattr(LanguageModel, "step", counted)
    with lm.batch() as batch:
        first = batch.add(PROMPTS[0], max_tokens=12)
        start = next(first)
        second = batch.add(f"Another one. {LONG}", max_tokens=3)  # joins while the first goes on
        assert start + "".join(first) == alone[PROMPTS[0]]
        assert second.prompt_seconds > 0
        text = "".join(second)
    assert text == "".join(lm.generate(f"Another one. {LONG}", max_tokens=3))
    assert counts[:4] == [1] * 4
    assert max(counts) == 2


@pytest.mark.deep
def test_sampling_of_each_prompt(lm):
    ways = [Sampling(temperature=0.9, seed=seed) for seed in (1, 2, 1)]
    prompts = [PROMPTS[0]] * 3
    texts = ["".join(one) for one in lm.generate_many(prompts, max_tokens=12, sampling=ways)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0] == "".join(lm.generate(PROMPTS[0], max_tokens=12, sampling=ways[0]))
    same = lm.generate_many(prompts, max_tokens=12, sampling=ways[1])
    assert ["".join(one) for one in same] == [texts[1]] * 3


@pytest.mark.deep
def test_stops_lengths_and_a_full_context(lm, alone):
    text = alone[PROMPTS[0]]
    with lm.batch() as batch:
        stopped = batch.add(PROMPTS[0], max_tokens=12, stop=text[9:14])
        nothing = batch.add(PROMPTS[0], max_tokens=0)
        full = batch.add("a " * 1019, max_tokens=12, raw=True)
        assert "".join(stopped) == text[:9]
        assert "".join(nothing) == ""
        full_text = "".join(full)
    assert [one.reason for one in (stopped, nothing, full)] == ["stop", "length", "context"]
    assert full.prompt_tokens + full.text_tokens == 1025
    assert full_text


@pytest.mark.deep
def test_threads_read_streams_of_one_batch(lm, alone):
    texts = {}
    with lm.batch() as batch:

        def work(prompt):
            texts[prompt] = "".join(batch.add(prompt, max_tokens=12))

        threads = [threading.Thread(target=work, args=(one,)) for one in PROMPTS]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert texts == {prompt: alone[prompt] for prompt in PROMPTS}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_ends_who_reads_and_others_go_on(lm, alone, monkeypatch, kind):
    streams = lm.generate_many(PROMPTS[:3], max_tokens=12)
    start = next(streams[0])
    head = LanguageModel._head_of
    with monkeypatch.context() as patch:

        def interrupted(self, x):
            head(self, x)
            raise kind

        patch.setattr(LanguageModel, "_head_of", interrupted)  # tokens are fed, logits are lost
        with pytest.raises(kind):
            list(streams[1])
    assert not list(streams[1])
    assert start + "".join(streams[0]) == alone[PROMPTS[0]]
    assert "".join(streams[2]) == alone[PROMPTS[2]]
    assert len(lm._free) == 4


def test_an_error_of_one_is_raised_where_it_is_read(lm, alone, monkeypatch):
    streams = lm.generate_many(PROMPTS[:2], max_tokens=12)

    def bad(logits, ids):
        raise ValueError("the logit of token 3 is nan")

    monkeypatch.setattr(streams[0]._sampler, "pick", bad)
    assert "".join(streams[1]) == alone[PROMPTS[1]]
    with pytest.raises(ValueError, match="token 3"):
        list(streams[0])
    assert not list(streams[0])


@pytest.mark.deep
def test_who_leaves_gives_a_sequence_back(lm, alone):
    batch = lm.batch()
    streams = [batch.add(one, max_tokens=12) for one in PROMPTS[:5]]
    next(streams[0])
    assert not lm._free
    streams[0].close()
    assert not list(streams[0])
    assert "".join(streams[4]) == alone[PROMPTS[4]]
    batch.close()
    assert len(lm._free) == 4
    streams = lm.generate_many(PROMPTS[:2])
    next(streams[0])
    del streams
    gc.collect()
    assert len(lm._free) == 4


def test_others_may_have_all_sequences(lm, alone):
    opened = [lm.sequence() for _ in range(4)]
    (stream,) = lm.generate_many(PROMPTS[:1], max_tokens=12)
    with pytest.raises(RuntimeError, match="4 sequences are open"):
        next(stream)
    opened[0].close()
    (stream,) = lm.generate_many(PROMPTS[:1], max_tokens=12)
    assert "".join(stream) == alone[PROMPTS[0]]
    with pytest.raises(ValueError, match="closed"):
        opened[0].feed([1])
    for one in opened:
        one.close()


@pytest.mark.deep
def test_arguments_are_checked_before_anything_runs(lm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt has"):
        lm.generate_many(["a", "a " * 2000])
    with pytest.raises(ValueError, match="2 prompts, and sampling for 1"):
        lm.generate_many(["a", "b"], sampling=[Sampling()])
    with pytest.raises(TypeError, match="prompts are several"):
        lm.generate_many("Hello")
    with pytest.raises(ValueError, match=r"prompts\[0\]: messages\[0\]"):
        lm.generate_many([{"role": "user", "content": "a conversation, not several"}])
    assert lm.generate_many([]) == []
    assert len(lm._free) == 4


@pytest.mark.deep
def test_32_sequences():
    lm = LanguageModel.load(
        smollm2(), context=64, sequences=32, activations="float", cache="float32", threads=2
    )
    prompts = [f"{number} and" for number in range(32)]
    texts = ["".join(one) for one in lm.generate_many(prompts, max_tokens=3, raw=True)]
    for number in (0, 13, 31):
        assert texts[number] == "".join(lm.generate(prompts[number], max_tokens=3, raw=True))


@pytest.mark.deep
def test_rows_of_steps_are_those_of_each(lm):
    """Nine sequences take a step of twelve rows, of which the last three are one again."""
    many = LanguageModel.load(smollm2(), context=64, sequences=9, activations="float", threads=2)
    opened = [many.sequence() for _ in range(9)]
    for number, one in enumerate(opened):
        one.feed([100 + number, 5])
    rows = many.step(opened, list(range(50, 59)))
    assert rows.shape == (9, many.vocabulary)
    again = many.step(opened, list(range(60, 69)))
    for number in (0, 8):
        opened[number].rewind(3)
        row = opened[number].feed([60 + number])
        assert np.linalg.norm(row - again[number]) < 1e-2 * np.linalg.norm(row)
