"""A function in a process of its own: answers, questions, progress, and how it may end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from lowbit_lab.bench.core.remote import Remote, RemoteError, run_remote, send_progress


def twice(value: int) -> int:
    print("a library that prints")
    send_progress(value, "is doubled")
    return 2 * value


def sums(start: int) -> Generator[int, int, None]:
    while True:
        start += yield start


def refuses(kind: type[Exception]) -> None:
    raise kind("no\nsuch engine")


class Foreign(Exception):
    """It is not known where it arrives."""


def ends(how: str) -> None:
    if how == "exit":
        sys.stderr.write("first\nout of luck\n")
        os._exit(3)
    if how == "silently":
        os._exit(3)
    os.abort()


@pytest.fixture(autouse=True)
def _found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process finds this file as pytest does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_a_function_has_one_answer_and_tells_its_progress() -> None:
    seen: list[tuple[object, ...]] = []
    assert run_remote(twice, 4, on_progress=lambda *values: seen.append(values)) == 8
    assert seen == [(4, "is doubled")]
    assert run_remote(twice, 5, seconds=60) == 10


def test_a_generator_answers_questions() -> None:
    with closing(Remote(sums, 3)) as process:
        assert [process.answer(60), process.ask(4, 60), process.ask(5)] == [3, 7, 12]


def test_variables_and_what_is_printed() -> None:
    with closing(Remote(os.getenv, "LOWBIT_TEST_REMOTE", LOWBIT_TEST_REMOTE="here")) as process:
        assert process.answer(60) == "here"
    with closing(Remote(twice, 4)) as process:
        process.answer(60)
        assert process.printed() == "a library that prints\n"


@pytest.mark.parametrize(("kind", "raised"), [(LookupError, LookupError), (Foreign, RuntimeError)])
def test_what_is_raised_is_told(kind: type[Exception], raised: type[Exception]) -> None:
    with pytest.raises(RemoteError, match=r"^such engine$") as caught:
        run_remote(refuses, kind)
    assert type(caught.value.raised) is raised


@pytest.mark.parametrize(
    ("how", "said"),
    [("exit", "out of luck"), ("silently", "exit status 3"), ("abort", "crashed with SIGABRT")],
)
def test_how_it_ends_is_told(how: str, said: str) -> None:
    with closing(Remote(ends, how)) as process:
        for ask in (process.answer, lambda: process.ask(1)):
            with pytest.raises(RemoteError, match=f"^{said}$") as caught:
                ask()
            assert caught.value.raised is None
            assert ("in ends" in caught.value.stderr) == (how == "abort")


def test_nobody_waits_without_end() -> None:
    with closing(Remote(time.sleep, 60)) as process:
        with pytest.raises(RemoteError, match="no answer within 0 s"):
            process.answer(0.1)
        with pytest.raises(RemoteError, match="crashed with SIGKILL"):
            process.answer(60)
