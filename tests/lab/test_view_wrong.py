"""What a view shows of wrong kernels: the case, the variables, both sides of a race, what lines
cost; and that it can be saved."""

# pyright: reportOperatorIssue=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32
from shared_arrays import BARRIER
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.spec import Case, exercises
from lowbit_lab import View, check, view
from lowbit_lab.checks.run import view_failing
from lowbit_lab.checks.smallest import smallest

HEAD = """
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Float32

def spec(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0 T"]:
    return x + 1.0
"""

STRIDES = """
@triton.jit
def kernel(x_ptr, z_ptr, N0, T, stride_x0, stride_x1, stride_z0, stride_z1, B1: tl.constexpr):
    j = tl.arange(0, B1)
    i = tl.program_id(0).to(tl.int64)
    for start in range(0, T, B1):
        x = tl.load(x_ptr + i * {stride} + (start + j) * stride_x1, mask=start + j < T)
        at = z_ptr + i * stride_z0 + (start + j) * stride_z1
        tl.store(at, x + 1.0, mask=start + j < {last})

def grid(meta):
    return meta["N0"]
"""


def written(tmp_path: Path, **parts: str) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + STRIDES.format(**{"stride": "stride_x0", "last": "T", **parts}))
    return file


@pytest.mark.deep
def test_a_file_opens_at_sizes_that_fail_made_smaller(tmp_path: Path) -> None:
    # Right where rows have 40 elements, as the exercise's do.
    data = view_failing(written(tmp_path, last="tl.minimum(T, 70)")).data
    assert data["sizes"] == {"N0": 1, "T": 71}
    assert data["findings"][0]["kind"] == "unwritten"
    assert data["notes"][0].startswith("check found first, with N0=")
    assert "elements never written. These are smaller sizes at which" in data["notes"][0]


@pytest.mark.deep
def test_a_file_opens_at_the_layout_that_fails(tmp_path: Path) -> None:
    file = written(tmp_path, stride="T")
    data = view_failing(file).data
    assert (data["layout"], data["sizes"]["N0"]) == ("padded", 2)
    assert "The tensors are padded." in data["notes"]
    assert data["findings"]
    run = CliRunner().invoke
    saved = str(tmp_path / "run.json")
    done = run(app, ["view", str(file), "--layout", "transposed", "--save", saved])
    assert done.exit_code == 0, done.output
    assert json.loads(Path(saved).read_text())["layout"] == "transposed"
    plain = run(app, ["view", str(file), "--sizes", "N0=3,T=5", "--save", saved])
    assert plain.exit_code == 0
    seen = json.loads(Path(saved).read_text())
    assert (seen["layout"], seen["sizes"]) == ("contiguous", {"N0": 3, "T": 5})
    assert seen["findings"] == []


@pytest.mark.deep
def test_a_file_that_is_right_opens_at_the_exercise(tmp_path: Path) -> None:
    data = view_failing(written(tmp_path)).data
    assert (data["sizes"], data["findings"], data["notes"]) == ({"N0": 40, "T": 40}, [], [])


@triton.jit
def stops_growing(x_ptr, z_ptr, N0, B0: tl.constexpr):
    total = 0
    for start in range(0, N0, B0):
        i = start + tl.arange(0, B0)
        x = tl.load(x_ptr + i, mask=i < N0, other=0.0)
        tl.store(z_ptr + i, x + 10.0, mask=i < N0)
        total = total + x


def test_what_another_run_shows_is_said() -> None:
    result = check(stops_growing, exercises.add_constant, device="cpu")
    assert result.kinds == ("not-compiled",)
    assert result.viewer is not None
    data = result.viewer().data
    assert [finding["kind"] for finding in data["findings"]] == ["not-compiled"]
    assert data["findings"][0]["line"] is not None


def test_smallest() -> None:
    operation = exercises.outer_add_blocks
    case = Case(operation, {"N0": 100, "N1": 90})
    found = smallest(case, lambda one: one.sizes["N0"] >= 33 and one.sizes["N1"] > 3)
    assert found.sizes == {"N0": 33, "N1": 4}
    assert smallest(case, lambda one: False) is case
    stepped = Case(exercises.quantized_matmul, {"N0": 5, "MID": 192, "N1": 3})
    assert smallest(stepped, lambda one: True).sizes == {"N0": 1, "MID": 64, "N1": 1}


@triton.jit
def add(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def every_eighth(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.arange(0, B0)
    x = tl.load(x_ptr + i * 8)
    tl.store(z_ptr + i, x)


def eighth(x: Float32[np.ndarray, "512"]) -> Float32[np.ndarray, "64"]:
    return x[::8]


def costs(data: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of each line that touches memory: lanes, idle ones, sectors asked for and needed."""
    kept = [line for line in data["lines"] if line["line"] is not None]
    return [tuple(line[key] for key in ("lanes", "idle", "asked", "needed")) for line in kept]


def test_what_lines_cost() -> None:
    data = view(add, exercises.add_constant_blocks, sizes={"N0": 70}).data
    # Two whole warps of 128 bytes, and one with 6 lanes, which are 24 bytes.
    assert costs(data) == [(96, 26, 4 + 4 + 1, 4 + 4 + 1)] * 2
    source = data["sources"][0]
    for line, call in zip(data["lines"], ("tl.load", "tl.store"), strict=True):
        assert call in source["lines"][line["line"][1] - source["first_line"]]
    # Each lane is in a sector of its own: 32 for 128 bytes.
    data = view(every_eighth, eighth, N0=64, B0=64).data
    assert costs(data) == [(64, 0, 64, 8), (64, 0, 8, 8)]


@triton.jit
def softmax_without_rescale(x_ptr, z_ptr, N0, T, B1: tl.constexpr):
    row = x_ptr + tl.program_id(0) * T
    largest = -float("inf")
    total = 0.0
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(row + j, mask=j < T, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(x, axis=0))
        total += tl.sum(tl.exp(x - largest), axis=0)
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(row + j, mask=j < T, other=-float("inf"))
        tl.store(z_ptr + tl.program_id(0) * T + j, tl.exp(x - largest) / total, mask=j < T)


def held(data: dict[str, Any], now: int) -> dict[str, Any]:
    """The variables of a program when a step begins, as the page works it out."""
    events, values = data["events"], dict[str, Any]()
    for change in data["changes"]:
        mine = events[change["event"]]["program"] == events[now]["program"]
        if mine and change["event"] <= now:
            values[data["registers"][change["register"]]["name"]] = change["values"]
    return values


def test_variables_by_step() -> None:
    taken = {"N0": 2, "T": 40}
    data = view(softmax_without_rescale, exercises.long_softmax, sizes=taken, B1=16).data
    assert data["machine"] is None
    x = np.float32(data["tensors"][0]["before"]).reshape(2, 40)
    loads = [n for n, one in enumerate(data["events"]) if one["kind"] == "load"]
    for row in range(2):
        first = loads[6 * row : 6 * row + 3]
        for block, now in enumerate(first):
            seen = held(data, now)
            assert seen["start"] == [16 * block]
            assert seen["j"] == list(range(16 * block, 16 * block + 16))
            assert "x_ptr" not in seen
            assert "row" not in seen, "no addresses"
            if block:
                before = x[row, : 16 * block]
                assert np.isclose(seen["largest"][0], before.max())
                assert seen["x"] == data["events"][first[block - 1]]["values"]
        # The sum of the first block is not made smaller when the largest grows.
        sums = [np.exp(x[row, :16] - x[row, :16].max()).sum()]
        assert np.isclose(held(data, first[1])["total"][0], sums[0], rtol=1e-5)


@pytest.mark.deep
def test_a_missing_barrier(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "mine.py"
    file.write_text(BARRIER.format(barrier="pass"))
    data = view_failing(file).data
    assert data["sizes"] == {"N0": 1}
    shared = [tensor for tensor in data["tensors"] if tensor["role"] == "shared"]
    assert [tensor["name"] for tensor in shared] == ["shared tile of block [0, 0, 0]"]
    race = data["findings"][0]
    lines = data["sources"][0]["lines"]

    def text(line: list[int]) -> str:
        return lines[line[1] - data["sources"][0]["first_line"]].strip()

    assert text(race["line"]) == "z[i] = tile[7 - t]"
    other = data["events"][race["other"]]
    assert text(other["line"]).startswith("tile[t] = ")
    assert other["kind"] == "store"
    assert other["elements"] == [race["element"]] == [7]
    assert data["programs"][other["program"]] != race["program"]


@pytest.mark.deep
def test_shared_arrays_and_warps_of_threads(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "mine.py"
    file.write_text(BARRIER.format(barrier="cuda.syncthreads()"))
    done = CliRunner().invoke(
        app, ["view", str(file), "--sizes", "N0=12", "--save", str(tmp_path / "run.json")]
    )
    assert done.exit_code == 0, done.output
    assert "48 bytes loaded, 48 stored" in done.output, "not those of shared memory"
    data = View.saved(tmp_path / "run.json").data
    assert data["findings"] == []
    x = data["tensors"][0]["before"]
    shared = [tensor for tensor in data["tensors"] if tensor["role"] == "shared"]
    assert [tensor["after"] for tensor in shared] == [x[:8], [*x[8:], 0, 0, 0, 0]]
    # Eight threads are one warp here: 32 bytes, and 16 in the second block.
    assert costs(data) == [(12, 0, 2, 2)] * 2
    first = next(n for n, one in enumerate(data["events"]) if one["kind"] == "store")
    assert {"t", "i"} <= set(held(data, first))


def test_a_view_is_saved_and_opened_again(tmp_path: Path) -> None:
    seen = view(add, exercises.add_constant_blocks, sizes={"N0": 70})
    again = View.saved(seen.save(tmp_path / "run.json"))
    assert again.data == seen.data
    assert again.html() == seen.html()
    run = CliRunner().invoke
    page = str(tmp_path / "page.html")
    done = run(app, ["view", str(tmp_path / "run.json"), "--html", page])
    assert done.exit_code == 0, done.output
    assert Path(page).read_text(encoding="utf-8") == seen.html()
    old = tmp_path / "old.json"
    for text, message in (
        ('{"schema": "lowbit-view-2"}', "is of the form 'lowbit-view-2', and this lowbit shows"),
        ("[1]", "is of the form None"),
        ("{", "old.json is no view: "),
    ):
        old.write_text(text)
        refused = run(app, ["view", str(old)])
        assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
        assert message in refused.stderr
    chosen = run(app, ["view", str(tmp_path / "run.json"), "--sizes", "N0=3"])
    assert "is a run that was saved; --sizes is of a new one" in chosen.stderr
    data = view(add, exercises.add_constant_blocks, sizes={"N0": 70}, layout="rows").data
    assert data["notes"] == ["The kernel takes no strides, so its tensors are contiguous."]
    strange = run(app, ["view", "add_constant", "--layout", "sideways"])
    assert "layout is 'sideways'; it must be one of contiguous, padded" in strange.stderr
