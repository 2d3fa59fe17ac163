"""`lowbit generate`, with an engine whose answers are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("tokenizers")

from language_models import FakeEngine, FakeSequence, smollm2_metadata
from typer.testing import CliRunner

import lowbit.lm
from lowbit.cli import app
from lowbit.lm import Stream, Tokenizer
from lowbit.lm.generation import generate

ANSWER = "Red, blue 😀.\nUser: more"


class FakeModel:
    """What the commands use of LanguageModel."""

    loaded: list[tuple[Any, ...]]
    caches: list[str]
    asked: list[tuple[Any, dict[str, Any]]]
    context = 200

    @classmethod
    def load(
        cls, path: Path, threads: int | None = None, sequences: int = 4,
        cache: str = "bfloat16", device: str = "cpu",
    ) -> FakeModel:  # fmt: skip
        if not path.suffix:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        if device != "cpu":
            raise RuntimeError(f"PyTorch finds no {device!r} here")
        cls.caches.append(cache)
        cls.loaded.append((path.name, threads, sequences))
        return cls()

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_gguf(smollm2_metadata())
        script = [*self.tokenizer.encode(ANSWER), 2]
        self.engine = FakeEngine(script, self.tokenizer.size, self.context)

    def generate(self, prompt: str | Sequence[Mapping[str, str]], **options: Any) -> Stream:
        self.asked.append((prompt if isinstance(prompt, str) else [*prompt], options))
        return generate(self.engine, self.tokenizer, prompt, **options)

    def generate_many(self, prompts: Sequence[Any], **options: Any) -> list[Stream]:
        return [self.generate(prompt, **options) for prompt in prompts]


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> type[FakeModel]:
    monkeypatch.setitem(vars(lowbit.lm), "LanguageModel", FakeModel)
    FakeModel.loaded, FakeModel.asked, FakeModel.caches = [], [], []
    return FakeModel


def call(*arguments: str, typed: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=typed, prog_name="lowbit")


def test_a_gpu_that_there_is_not():
    done = call("generate", "a.gguf", "Colours?", "--device", "cuda")
    assert done.exit_code == 2
    assert "PyTorch finds no 'cuda' here" in done.output


def test_the_text_is_on_stdout_and_its_speed_on_stderr(model: type[FakeModel]) -> None:
    done = call("generate", "a.gguf", "Colours?", "--threads", "3")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ANSWER + "\n"
    assert "prompt: 33 tokens in " in done.stderr
    assert "tokens/s; text: 10 tokens in " in done.stderr
    assert done.stderr.endswith("tokens/s; ended by end\n")
    assert model.loaded == [("a.gguf", 3, 1)]


def test_options_reach_the_model(model: type[FakeModel]) -> None:
    options = ("--max-tokens", "7", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.8",
               "--min-p", "0.1", "--repeat-penalty", "1.1", "--seed", "4", "--stop", "a",
               "--stop", "b", "--speculate", "5")  # fmt: skip
    done = call("generate", "a.gguf", "-", "--system", "Be brief.", *options, typed="Hi\n")
    assert done.exit_code == 0, done.stderr
    prompt, given = model.asked[0]
    assert prompt == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"}
    ]  # fmt: skip
    sampling = lowbit.lm.Sampling(0.5, 9, 0.8, 0.1, 1.1, 4)
    assert given == {"max_tokens": 7, "sampling": sampling, "stop": ["a", "b"], "raw": False,
                     "speculate": 5}  # fmt: skip
    once = call("generate", "a.gguf", "Once", "--raw", "--cache", "int8")
    assert once.stdout == ANSWER + "\n"
    assert model.caches == ["bfloat16", "int8"]
    assert model.asked[1][0] == "Once"
    assert model.asked[1][1]["raw"]


def test_json_is_written_beside_the_text_or_alone(tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    arguments = ("generate", "a.gguf", "Colours?", "--stop", "\nUser:", "--json")
    done = call(*arguments, str(file))
    assert done.stdout == "Red, blue 😀.\n"
    found = json.loads(file.read_text())
    alone = json.loads(call(*arguments, "-").stdout)
    assert found.keys() == alone.keys()
    assert alone["text"] == found["text"] == "Red, blue 😀."
    assert (found["reason"], found["prompt_tokens"]) == ("stop", 33)


@pytest.mark.deep
def test_several_prompts_are_answered_in_their_order(
    tmp_path: Path, model: type[FakeModel]
) -> None:
    file = tmp_path / "texts.json"
    arguments = ("generate", "a.gguf", "One", "Two", "-", "--sequences", "2", "--stop", "\nUser:")
    done = call(*arguments, "--json", str(file), typed="Three")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "\n".join(["Red, blue 😀.\n"] * 3)
    assert done.stderr.startswith("3 prompts: ")
    assert model.loaded == [("a.gguf", None, 2)]
    assert [prompt for prompt, _ in model.asked] == ["One", "Two", "Three"]
    assert [one["reason"] for one in json.loads(file.read_text())] == ["stop"] * 3


def test_what_was_guessed_is_told() -> None:
    done = call("generate", "a.gguf", "--speculate", "7", typed="Hi\nAnd?\n")
    assert done.exit_code == 0
    assert done.stdout == f"{ANSWER}\n" * 2  # the second one is in its prompt
    assert " guesses right; ended by end" in done.stderr.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate", "nowhere", "a"), 2, "nowhere: No such file"),
        (("generate", "a.gguf", "a", "--raw", "--system", "b"), 2, "--raw takes a text as it is"),
        (("generate", "a.gguf", "a", "--top-p", "2"), 2, "top_p is 2.0; it must be above 0"),
        (("generate", "a.gguf", "a", "--max-tokens", "-2"), 2, "max_tokens is -2"),
        (("generate", "a.gguf", "a " * 300), 2, "tokens; the context holds 200"),
        (("generate", "a.gguf", "a", "--stop", ""), 2, "a stop string is empty"),
        (("generate", "a.gguf", "a", "--json", "/nowhere/a"), 2, "/nowhere/a: No such file"),
        (("generate", "a.gguf", "--temperature", "-1"), 2, "temperature is -1.0"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = call(*arguments, typed="")
    assert done.exit_code == code
    assert done.stdout == ""
    assert done.stderr.startswith("lowbit: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_conversation_keeps_what_was_said(model: type[FakeModel]) -> None:
    done = call("generate", "a.gguf", "--system", "S", "--stop", "\n", typed="Hi\n\nAnd?\n")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "Red, blue 😀.\n" * 2
    assert [one["content"] for one in model.asked[0][0]] == ["S", "Hi"]
    assert [one["content"] for one in model.asked[1][0]] == ["S", "Hi", "Red, blue 😀.", "And?"]
    assert done.stderr.count("ended by stop") == 2


def test_a_conversation_that_is_full_goes_on(model: type[FakeModel]) -> None:
    """The context holds 200 tokens; an answer has 10, a question some 20."""
    said = [f"Number {n}: what is the colour of the sky?" for n in range(9)]
    said[5] = "much too long " * 80
    done = call("generate", "a.gguf", "--system", "S", "--max-tokens", "20", typed="\n".join(said))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{ANSWER}\n" * 8
    told = [line for line in done.stderr.splitlines() if "context" in line]
    assert told[-1] == "the context is full: without the 1 oldest of what was said"
    assert sum("tokens do not fit the context of 200" in line for line in told) == 1
    asked = [[one["content"] for one in prompt] for prompt, _ in model.asked]
    assert {one[0] for one in asked} == {"S"}
    assert [one[-1] for one in asked] == said[:5] + said[6:]
    assert asked[2][1] == said[0]
    assert said[0] not in asked[-1]
    assert said[7] in asked[-1]  # but for the oldest, all stays
    assert len(asked[-1]) % 2 == 0


def test_ctrl_c_ends_the_text_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: type[FakeModel]
) -> None:
    feed = FakeSequence.feed

    def interrupted(self: FakeSequence, ids: Sequence[int], **options: bool) -> np.ndarray:
        if len(self.engine.fed) == 3:
            self.engine.fed.append([])
            raise KeyboardInterrupt
        return feed(self, ids, **options)

    monkeypatch.setattr(FakeSequence, "feed", interrupted)
    file = tmp_path / "text.json"
    done = call("generate", "a.gguf", "Colours?", "--json", str(file))
    assert done.exit_code == 130
    assert done.stdout == "Red, blue\n"
    assert "text: 3 tokens" in done.stderr
    assert "ended by Ctrl-C" in done.stderr
    assert json.loads(file.read_text())["text"] == "Red, blue"
    done = call("generate", "a.gguf", "--speculate", "0", typed="Hi\nAnd?\n")
    assert done.exit_code == 0
    assert done.stdout == "Red, blue\n" * 2


@pytest.mark.deep
def test_a_signal_ends_a_process_with_what_it_has_made() -> None:
    code = (
        "import signal, sys, time, lowbit.lm, test_generate_command as t\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "lowbit.lm.LanguageModel = t.FakeModel\n"
        "t.FakeModel.loaded, t.FakeModel.asked, t.FakeModel.caches = [], [], []\n"
        "feed = t.FakeSequence.feed\n"
        "def slow(self, ids, **options):\n"
        "    if len(self.engine.fed) == 2:\n"
        "        print('\\n', file=sys.stderr, flush=True)\n"
        "        time.sleep(60)\n"
        "    return feed(self, ids, **options)\n"
        "t.FakeSequence.feed = slow\n"
        "sys.argv = ['lowbit', 'generate', 'a.gguf', 'Colours?']\n"
        "from lowbit.cli import main; main()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == "Red,\n"
    assert "ended by Ctrl-C" in err
