"""The loop around an engine, with one whose answers are known."""

from __future__ import annotations

import dataclasses
import gc
from threading import Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from language_models import FakeEngine, FakeSequence, smollm2_metadata

from lowbit.lm import Sampling, Tokenizer
from lowbit.lm.generation import generate
from lowbit.lm.speculation import PromptLookup

TEXT = "I like 😀 and tea.\nUser: me too"


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())


def engine_for(tokenizer: Tokenizer, text: str = TEXT, **options: Any) -> FakeEngine:
    """An engine that makes a text, and then the token that ends a turn."""
    return FakeEngine([*tokenizer.encode(text), 2], tokenizer.size, **options)


def test_a_text_is_made_to_its_end(smollm: Tokenizer) -> None:
    engine = engine_for(smollm)
    stream = generate(engine, smollm, "Hello", raw=True)
    assert (stream.reason, stream.prompt_tokens, stream.text_tokens) == ("", 1, 0)
    pieces = list(stream)
    assert "".join(pieces) == TEXT
    assert "" not in pieces
    count = len(smollm.encode(TEXT))
    assert (stream.reason, stream.text_tokens) == ("end", count)
    assert engine.fed == [smollm.encode("Hello"), *([id] for id in smollm.encode(TEXT))]
    assert [sequence.closed for sequence in engine.sequences] == [True]
    found = stream.figures()
    assert found["reason"] == "end"
    assert found["prompt_tokens_per_second"] == 1 / stream.prompt_seconds
    assert found["text_tokens_per_second"] == count / stream.text_seconds
    assert list(stream) == []


def test_tokens_that_the_engine_knows_are_not_fed_again(smollm: Tokenizer) -> None:
    engine = engine_for(smollm, known=2)
    ids = smollm.encode("a b c d")
    stream = generate(engine, smollm, "a b c d", raw=True)
    assert "".join(stream) == TEXT
    assert engine.fed[0] == ids[2:]
    assert (stream.prompt_tokens, stream.known_tokens) == (4, 2)
    assert stream.figures()["prompt_tokens_per_second"] == 2 / stream.prompt_seconds


def test_a_conversation_and_a_question_go_through_the_template(smollm: Tokenizer) -> None:
    engine = engine_for(smollm, context=100)
    messages = [{"role": "user", "content": "Hello"}]
    expected = smollm.encode(smollm.chat(messages), special=False)
    for prompt in ("Hello", messages):
        assert "".join(generate(engine, smollm, prompt)) == TEXT
        assert engine.fed[0] == expected
    without = dataclasses.replace(smollm, template=None)
    assert "".join(generate(engine, without, "Hello")) == TEXT
    assert engine.fed[0] == smollm.encode("Hello")
    with pytest.raises(ValueError, match="no chat template"):
        generate(engine, without, messages)
    with pytest.raises(ValueError, match="raw takes a text"):
        generate(engine, smollm, messages, raw=True)


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_length(smollm: Tokenizer, count: int) -> None:
    engine = engine_for(smollm)
    stream = generate(engine, smollm, "Hello", raw=True, max_tokens=count)
    text = "".join(stream)
    assert text == smollm.decode(smollm.encode(TEXT)[:count])  # half an emoji, too
    assert (stream.reason, stream.text_tokens) == ("length", count)
    assert len(engine.fed) == count
    assert (stream.figures()["prompt_tokens_per_second"] > 0) == (count > 0)


def test_stop_strings_end_across_tokens(smollm: Tokenizer) -> None:
    stream = generate(engine_for(smollm), smollm, "Hello", raw=True, stop=["\nUser:"])
    assert "".join(stream) == "I like 😀 and tea."
    assert stream.reason == "stop"
    stream = generate(engine_for(smollm, "a ##"), smollm, "Hello", raw=True, stop="###")
    assert "".join(stream) == "a ##"
    assert stream.reason == "end"


def test_a_full_context_ends_the_text(smollm: Tokenizer) -> None:
    engine = engine_for(smollm, context=4)
    stream = generate(engine, smollm, "a b c", raw=True)
    assert "".join(stream) == smollm.decode(smollm.encode(TEXT)[:2])
    assert (stream.reason, stream.text_tokens) == ("context", 2)
    stream = generate(engine, smollm, "a b c d", raw=True)
    assert "".join(stream) == "I"
    with pytest.raises(ValueError, match="the prompt has 5 tokens; the context holds 4"):
        generate(engine, smollm, "a b c d e", raw=True)


def test_arguments_are_checked_before_anything_runs(smollm: Tokenizer) -> None:
    engine = engine_for(smollm)
    with pytest.raises(ValueError, match="max_tokens is -1; it must be at least 0"):
        generate(engine, smollm, "a", max_tokens=-1)
    with pytest.raises(ValueError, match="a stop string is empty"):
        generate(engine, smollm, "a", stop=[""])
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        generate(engine, smollm, [{}])
    without = dataclasses.replace(smollm, bos=None)
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(engine, without, "", raw=True)
    assert not engine.sequences
    assert "".join(generate(engine, smollm, "", raw=True)) == TEXT
    assert engine.fed[0] == [smollm.bos]


def test_sampling_sees_the_tokens_so_far(smollm: Tokenizer) -> None:
    engine = FakeEngine([40] * 3, smollm.size)
    sampling = Sampling(repeat_penalty=1e9)
    stream = generate(engine, smollm, "a", raw=True, max_tokens=3, sampling=sampling)
    list(stream)
    assert engine.fed[1] == [40]
    assert engine.fed[2] == [40]  # its logit is tiny, but still the only one above 0
    engine = FakeEngine([40] * 3, smollm.size)
    first, second = (
        "".join(generate(engine, smollm, "a", raw=True, max_tokens=3,
                         sampling=Sampling(temperature=99.0, seed=5)))
        for _ in range(2)
    )  # fmt: skip
    assert first == second


@pytest.mark.parametrize("speculate", [1, 3, 7])
@pytest.mark.parametrize("stop", [(), "three. Four"])
def test_a_text_that_repeats_is_guessed(smollm: Tokenizer, speculate: int, stop: Any) -> None:
    text = "One two three. " * 6 + "Four five."
    plain = generate(engine_for(smollm, text), smollm, "Hello", raw=True, stop=stop, speculate=0)
    engine = engine_for(smollm, text)
    stream = generate(engine, smollm, "Hello", raw=True, stop=stop, speculate=speculate)
    assert "".join(stream) == "".join(plain)
    assert (stream.reason, stream.text_tokens) == (plain.reason, plain.text_tokens)
    assert plain.proposed_tokens == 0
    assert 5 < stream.accepted_tokens < stream.proposed_tokens  # none of four and five
    assert len(engine.fed) == plain.text_tokens + (stop == ()) - stream.accepted_tokens
    assert stream.figures()["accepted_tokens"] == stream.accepted_tokens
    assert max(map(len, engine.fed)) == 1 + speculate


@pytest.mark.parametrize("count", range(18, 26))
def test_guesses_end_with_the_text_and_the_context(smollm: Tokenizer, count: int) -> None:
    text = "One two three. " * 9
    ids = smollm.encode(text)
    how: dict[str, Any] = {"raw": True, "speculate": 7}
    stream = generate(engine_for(smollm, text), smollm, "Hello", max_tokens=count, **how)
    assert "".join(stream) == smollm.decode(ids[:count])
    assert (stream.reason, stream.text_tokens) == ("length", count)
    engine = engine_for(smollm, text, context=count)
    stream = generate(engine, smollm, "Hello", **how)
    assert "".join(stream) == smollm.decode(ids[:count])
    assert (stream.reason, stream.text_tokens) == ("context", count)
    assert stream.accepted_tokens


def test_a_text_that_does_not_repeat_stops_guesses(smollm: Tokenizer) -> None:
    """Every three tokens came before, and something else follows."""
    prompt = [7, 8, 9, 1, 8, 9, 7, 2, 9, 7, 8, 3]
    lookup = PromptLookup(7)
    ids, guessed = [*prompt, 7, 8, 9], 0
    for index in range(640):
        if lookup.propose(ids, 99):
            guessed += 1
            lookup.count(7, 0)
        ids.append(7 + index % 3)
    assert guessed <= 2 + 640 // 128
    assert PromptLookup(4).propose([1, 2, 3, 4, 1, 2, 3], 9) == [4, 1, 2, 3]
    assert PromptLookup(7).propose([5, 5, 5, 5], 9) == [5] * 7
    assert PromptLookup(7).propose([1, 2, 3, 4, 1, 2, 3], 2) == [4, 1]
    assert PromptLookup(7).propose([1, 2, 3], 7) == []
    assert PromptLookup(0).propose([5] * 9, 7) == []
    for wrong in (-1, 8):
        with pytest.raises(ValueError, match=f"speculate is {wrong}; it must be from 0 to 7"):
            generate(engine_for(smollm), smollm, "Hello", speculate=wrong)


@pytest.mark.deep
def test_what_is_closed_or_let_go_gives_its_memory_back(smollm: Tokenizer) -> None:
    engine = engine_for(smollm)
    stream = generate(engine, smollm, "Hello", raw=True)
    assert next(stream) == "I"
    stream.close()
    assert engine.sequences[-1].closed
    assert (stream.reason, stream.text_tokens) == ("", 1)
    stream = generate(engine, smollm, "Hello", raw=True)
    next(stream)
    del stream
    gc.collect()
    assert engine.sequences[-1].closed


def test_an_interruption_leaves_the_engine_usable(
    smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(smollm)
    feed = FakeSequence.feed

    def interrupted(self: FakeSequence, ids: list[int], **options: bool) -> np.ndarray:
        if len(engine.fed) == 3:
            raise KeyboardInterrupt
        return feed(self, ids, **options)

    stream = generate(engine, smollm, "Hello", raw=True)
    monkeypatch.setattr(FakeSequence, "feed", interrupted)
    pieces: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pieces.extend(stream)
    assert engine.sequences[-1].closed
    assert stream.text_tokens == 3
    assert stream.text_seconds >= 0
    monkeypatch.setattr(FakeSequence, "feed", feed)
    assert "".join(generate(engine, smollm, "Hello", raw=True)) == TEXT


def test_threads_share_a_tokenizer(smollm: Tokenizer) -> None:
    texts: dict[int, str] = {}

    def run(index: int) -> None:
        engine = engine_for(smollm, f"{TEXT} {index}")
        texts[index] = "".join(generate(engine, smollm, f"Hello {index}"))

    threads = [Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {index: f"{TEXT} {index}" for index in range(4)}
