"""What all commands have in common: help, one meaning of each option, and completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import numpy as np
import typer
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.graph import save
from lowbit.graph.graph import Graph, Node, Tensor


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, groups too."""
    yield words, command
    if hasattr(command, "list_commands"):
        context = typer.Context(command)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*words, name))


@pytest.fixture(scope="module")
def commands() -> dict[tuple[str, ...], Any]:
    return dict(_commands(typer.main.get_command(app)))


@pytest.mark.deep
def test_every_command_has_help_and_an_example(commands: dict[tuple[str, ...], Any]) -> None:
    assert {("info",), ("bench", "matmul"), ("explain", "matmul"), ("run",)} <= commands.keys()
    for words, command in commands.items():
        told = CliRunner().invoke(app, [*words, "-h"])
        assert told.exit_code == 0, words
        assert f"Example: lowbit {' '.join(words)}".strip() in " ".join(told.output.split()), words
        for one in command.params:
            assert getattr(one, "help", "") or one.name == "help", (words, one.name)


def test_options_mean_the_same_everywhere(commands: dict[tuple[str, ...], Any]) -> None:
    by_option: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for words, command in commands.items():
        for one in command.params:
            for option in one.opts:
                by_option.setdefault(option, []).append((words, one))
    json_file = by_option["--json"]
    assert {("info",), ("bench", "demo"), ("run",), ("quantize",), ("view",)} <= {
        w for w, _ in json_file
    }
    assert {one.help for _, one in json_file} == {"Write it as JSON to a file; -: to the terminal."}
    # What is traced is another library's call, which is read in one thread.
    threads = [one for words, one in by_option["--threads"] if words != ("explain", "call")]
    assert {(one.default, one.show_default) for one in threads} == {(None, "all")}
    assert {one.default for _, one in by_option["--seed"]} == {0}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("lowbit inf", {"info"}),
        ("lowbit bench mat", {"matmul"}),
        ("lowbit check long_", {"long_sum", "long_softmax"}),
        ("lowbit learn mul_", {"mul_relu_backward"}),
        ("lowbit quantize resnet3", {"resnet34"}),
    ],
)
def test_shells_complete(words: str, offered: set[str]) -> None:
    environment = {
        "_LOWBIT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    told = CliRunner().invoke(app, [], env=environment, prog_name="lowbit")
    assert offered <= set(told.output.split()), told.output


def test_run_writes_json_to_the_terminal_alone(tmp_path: Path) -> None:
    tensors = {"x": Tensor("float32", ("n", 3))}
    graph = Graph(("x",), ("y",), (Node("Relu", ("x",), ("y",)),), {}, tensors)
    save(graph, tmp_path / "tiny.safetensors")
    np.save(tmp_path / "x.npy", np.array([[-1, 0, 2]], np.float32))
    files = [str(tmp_path / "tiny.safetensors"), "--input", str(tmp_path / "x.npy")]
    told = CliRunner().invoke(app, ["run", *files, "--profile", "--json", "-"])
    found = json.loads(told.stdout)
    assert found["outputs"] == {"y": {"dtype": "float32", "shape": [1, 3], "range": [0.0, 2.0]}}
    assert 0 < found["seconds"]["least"] <= found["seconds"]["median"]
    assert found["nodes"]


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (("anatomy", "mine.py"), "lowbit explain kernel"),
        (("chat", "a.gguf"), "lowbit generate MODEL"),
        (("tune", "gpu"), "lowbit bench tune"),
    ],
)
def test_an_old_name_answers_with_the_new_one(words: tuple[str, ...], new: str) -> None:
    told = CliRunner().invoke(app, [*words])
    assert told.exit_code == 2
    assert new in told.output


@pytest.mark.deep
def test_explain_goes_by_what_is_named(tmp_path: Path) -> None:
    from lowbit_lab.cli.explain import kind_of

    (tmp_path / "kernel.py").write_text("def spec(): ...\n")
    (tmp_path / "script.py").write_text("import numpy\n\ndef run():\n    return 1\n")
    known = {
        "64x128:128x32": "matmul",
        "product:generic": "kernel",
        "long_sum": "kernel",
        f"{tmp_path}/kernel.py": "kernel",
        f"{tmp_path}/kernel.py:second": "kernel",
        f"{tmp_path}/script.py": "call",
        "absent.py": "kernel",
        "torch:linear 8x8": "call",
        "onnxruntime:net.onnx": "call",
        "resnet34": "network",
        "mine.models:make": "network",
        "net.onnx": "network",
    }
    assert {named: kind_of(named) for named in known} == known
    told = CliRunner().invoke(app, ["explain", "nothing"])
    assert "no model is called 'nothing'" in told.output
    assert told.exit_code
