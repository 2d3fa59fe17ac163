"""Requests to a real model that go wrong, or come at once, and those that follow them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("tokenizers")

from language_models import smollm2

from lowbit.lm import LanguageModel, Sampling
from lowbit.lm.model import TokenSequence

PATH = smollm2()
PROMPT = "Name three colours."


@pytest.fixture(scope="module")
def lm():
    return LanguageModel.load(PATH, context=128, sequences=2, threads=2)


@pytest.fixture(scope="module")
def answer(lm):
    return "".join(lm.generate(PROMPT, max_tokens=24))


@pytest.fixture(autouse=True)
def sequences_are_given_back(lm):
    yield
    assert sorted(lm._free) == [0, 1]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["chunk", "step", "head"])
@pytest.mark.parametrize("done", [False, True])
def test_ctrl_c_and_another_request(lm, answer, monkeypatch, name, done):
    """Before or after a part of the model has run."""
    compute, calls = getattr(lm._backend, name), []

    def interrupted(*rows, **more):
        calls.append(name)
        made = compute(*rows, **more) if done or len(calls) != 3 else None
        if len(calls) == 3:
            raise KeyboardInterrupt
        return made

    with monkeypatch.context() as patch:
        patch.setattr(lm._backend, name, interrupted)
        text = f"Yes. {answer} " * 2  # chunks of a prompt, and guesses
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for prompt in (text, f"No. {text}", f"So. {text}"):
                list(lm.generate(prompt, max_tokens=12))
    assert "".join(lm.generate(PROMPT, max_tokens=24)) == answer


@pytest.mark.deep
def test_a_signal_while_the_model_runs() -> None:
    """A process takes SIGINT wherever it is, and answers again."""
    code = (
        "import os, signal, sys, threading\n"
        "from lowbit.lm import LanguageModel\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"lm = LanguageModel.load({str(PATH)!r}, context=512, sequences=1)\n"
        f"want = ''.join(lm.generate({PROMPT!r}, max_tokens=24))\n"
        "for delay in (0.01, 0.05, 0.1, 0.2):\n"
        "    kill = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))\n"
        "    try:\n"
        "        kill.start()\n"
        "        for _ in range(99):\n"
        "            list(lm.generate('Tell me a long story.', max_tokens=400))\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        f"    assert ''.join(lm.generate({PROMPT!r}, max_tokens=24)) == want\n"
        "print('good')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ}, text=True, timeout=300,
        capture_output=True,
    )  # fmt: skip
    assert done.stdout == "good\n", done.stderr


def test_threads_that_generate_at_once_and_one_too_many(lm, answer):
    texts, errors, inside = [], [], threading.Barrier(2)

    def work():
        stream = lm.generate(PROMPT, max_tokens=24)
        text = next(stream)
        inside.wait()  # both have a sequence
        try:
            next(lm.generate("One more"))
        except RuntimeError as error:
            errors.append(str(error))
        inside.wait()
        texts.append(text + "".join(stream))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert texts == [answer] * 2
    assert errors == ["2 sequences are open: close one, or load the model with more"] * 2


def test_stop_strings_across_tokens(lm, answer):
    ids = lm.tokenizer.encode(answer, special=False)
    ends = [len(lm.tokenizer.decode(ids[:count])) for count in range(1, 8)]
    for end in ends:
        stop = answer[max(end - 2, 0) : end + 2]  # of two tokens or more
        stream = lm.generate(PROMPT, max_tokens=24, stop=["nowhere", stop])
        assert "".join(stream) == answer[: answer.index(stop)]
        assert stream.reason == "stop"


@pytest.mark.parametrize("prompt", ["", " ", [{"role": "user", "content": ""}]])
def test_an_empty_prompt(lm, prompt):
    assert "".join(lm.generate(prompt, max_tokens=4))
    if isinstance(prompt, str):
        stream = lm.generate(prompt, max_tokens=4, raw=True)
        assert stream.prompt_tokens == 1
        assert "".join(stream)


def test_a_conversation_without_messages(lm):
    with pytest.raises(ValueError, match="the conversation has no messages"):
        lm.generate([])


@pytest.mark.parametrize("speculate", [0, 7])
@pytest.mark.parametrize("count", [120, 127, 128])
def test_a_cache_that_runs_full(lm, count, speculate):
    sampling = Sampling(repeat_penalty=1.0)
    stream = lm.generate("a" + " a" * (count - 1), raw=True, speculate=speculate,
                         sampling=sampling)  # fmt: skip
    text = "".join(stream)
    assert (stream.prompt_tokens, stream.reason) == (count, "context")
    assert stream.text_tokens == 129 - count
    assert text


def test_a_prompt_longer_than_the_context(lm):
    with pytest.raises(ValueError, match="the prompt has 129 tokens; the context holds 128"):
        lm.generate("a" + " a" * 128, raw=True)


def test_a_chat_template_that_raises(lm, answer, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    refusing = dataclasses.replace(lm.tokenizer, template=template)
    with monkeypatch.context() as patch:
        patch.setitem(vars(lm), "tokenizer", refusing)
        for ask in (lm.generate, lm.batch().add, lambda one: lm.generate_many([one])):
            with pytest.raises(ValueError, match="the chat template: roles must alternate"):
                ask(PROMPT)
    assert "".join(lm.generate(PROMPT, max_tokens=24)) == answer


def test_an_open_sequence_is_given_back_when_it_is_let_go(lm):
    sequence = lm.sequence()
    assert isinstance(sequence, TokenSequence)
    sequence.close()
    sequence.close()
    assert len(lm._free) == 2
    lm.sequence()
    assert len(lm._free) == 2
