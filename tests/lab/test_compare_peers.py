"""What variants are timed beside, how operands are arranged for them, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("jaxtyping")
pytest.importorskip("numba")

from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import language_of
from lowbit_lab.backends.source import read
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.compare.built import Built
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.run import Result, compare
from lowbit_lab.compare.text import render

FILE = """
import os
from functools import partial

import numpy as np
from jaxtyping import Float32
from numba import njit
from lowbit.spec import operation
from lowbit_lab import Packed
from lowbit_lab.compare import variant


@operation(
    exercise={"M": 3, "N": 4, "K": 5}, factors=("a", "b"), accumulator="float32", result="out"
)
def spec(
    a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
) -> Float32[np.ndarray, "M N"]:
    return a @ b


sizes = {"M": 7, "N": 8, "K": 9}


@njit
def plain(a, b, out):
    '''Three loops.

    Here stands more.
    '''
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[k, n]
            out[m, n] = total


@njit
def rows(a, b, out):
    '''b lies column by column'''
    for m in range(out.shape[0]):
        for n in range(out.shape[1]):
            total = np.float32(0)
            for k in range(a.shape[1]):
                total += a[m, k] * b[n, k]
            out[m, n] = total


@njit
def renamed(left, b, out):
    rows(left, b, out)


@njit
def wrong_where_large(a, b, out):
    plain(a, b, out)
    if out.shape[0] > 3:
        out[0, 0] += 1


def turned(b):
    return np.ascontiguousarray(b.T)


def numpy(a, b):
    '''BLAS.'''
    return partial(np.matmul, a, b)


def with_reader(a, b):
    return lambda: (a @ b).tolist(), partial(np.array, dtype=np.float32)


def no_number(a, b):
    return lambda: (a @ b) * np.float32("nan")


def refuses(a, b):
    raise ValueError("no such product\\nand more")


def shorter(a, b):
    return lambda: (a @ b)[1:]


def not_there(a, b):
    import no_such_module


def crashes(a, b):
    os.abort()


variants = [
    plain,
    variant(rows, arrange={"b": turned}),
    variant(renamed, left=Packed("a", np.ascontiguousarray), b=Packed("b", turned)),
    variant(rows, name="not arranged"),
    wrong_where_large,
]
peers = [numpy, refuses, crashes, with_reader, no_number, shorter, not_there]
base = "numpy", "plain"
"""


deep_fixtures = ("found",)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    file = tmp_path_factory.mktemp("compared") / "variants.py"
    file.write_text(FILE)
    return compare(file, limits=Limits(noise=0.5, seconds=0.2))


@pytest.mark.deep
def test_what_a_variant_arranges_is_judged_as_the_operation(found: Result) -> None:
    checked = {one.name: one.checked.ok for one in found.variants}
    assert checked == {
        "plain": True, "rows": True, "renamed": True, "not arranged": False,
        "wrong_where_large": False,
    }  # fmt: skip


def test_what_is_wrong_only_where_it_is_timed_is_wrong(found: Result) -> None:
    (note,) = (note for note in found.notes if note.startswith("wrong_where_large"))
    assert note.startswith("wrong_where_large was not timed: it is wrong at the sizes that are ")
    assert "furthest off is [0, 0]" in note
    assert not found.ok


def test_peers_stand_beside_variants_with_their_errors(found: Result) -> None:
    timed = {one.name: one for one in (*found.variants, *found.peers) if one.seconds}
    assert [*timed] == ["plain", "rows", "renamed", "numpy", "with_reader", "no_number"]
    assert timed.pop("no_number").error is None
    assert "NaN" not in found.to_json()
    for name, one in timed.items():
        assert one.error is not None
        assert one.error < 1e-6
        assert set(one.ratios) == {"numpy", "plain"} - {name}
        assert one.peak_share is None or 0 < one.peak_share <= 1
    assert [one.idea for one in timed.values()] == [
        "Three loops", "b lies column by column", "", "BLAS", "",
    ]  # fmt: skip
    assert found.ceiling is not None
    assert found.ceiling.dtype == "float32"


def test_who_cannot_is_left_out_with_the_reason(found: Result) -> None:
    assert found.notes[-4:] == (
        "refuses was not timed: no such product",
        "crashes was not timed: tried in a process of its own: crashed with SIGABRT",
        "shorter was not timed: the result has the shape (6, 8); expected (7, 8)",
        "not_there was not timed: No module named 'no_such_module'",
    )


def test_the_table_shows_all_of_it(found: Result) -> None:
    console = Console(width=240)
    with console.capture() as captured:
        console.print(render(found))
    text = captured.get()
    for heading in ("times as fast as numpy", "times as fast as plain", "% of peak", "error"):
        assert heading in text
    assert "BLAS" in text
    # Nothing here has registers of a GPU.
    assert "regs" not in text
    assert "compiled for sm" not in text
    # An idea is told in its column; a docstring is no change of the text.
    assert "Here stands more" not in text


@pytest.mark.deep
def test_without_a_specification_operands_are_arranged_too(tmp_path: Path) -> None:
    file = tmp_path / "variants.py"
    file.write_text("""
import numpy as np
from numba import njit
from lowbit_lab.compare import variant

def inputs(sizes):
    return {"x": np.arange(6.0).reshape(2, 3), "z": np.zeros(6)}

sizes, output = {"N": 6}, "z"

@njit
def by_rows(x, z):
    z[:] = x.reshape(-1)

@njit
def by_columns(x, z):
    z[:] = x.T.copy().reshape(-1)

variants = [by_rows, variant(by_columns, arrange={"x": lambda x: np.ascontiguousarray(x.T)})]
""")
    first, second = compare(file, limits=Limits(noise=0.5, seconds=0.1)).variants
    assert second.checked.ok
    assert first.error is None
    assert first.peak_share is None


ON_GPU = """
import triton
import triton.language as tl
from lowbit.spec.exercises import add_constant_blocks as spec
from lowbit_lab.compare import variant

sizes, constants = {"N0": 64}, {"B0": 32, "num_warps": 1}

@triton.jit
def plus_ten(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=i < N0) + 10, mask=i < N0)

def of_tensors(x):
    return lambda: x.add(10)

variants = [plus_ten, variant(plus_ten, name="elsewhere"), variant(plus_ten, name="off by one")]
peers = [of_tensors]
base = "of_tensors"
"""


@pytest.mark.deep
def test_what_runs_on_a_gpu_is_checked_and_timed_on_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU that is none: its tensors are a CPU's, and a launch is a function of them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from lowbit_lab.bench.core.cpu import Cpu
    from lowbit_lab.compare import run, timing

    def call(variant: Variant, built: Built, problem: Problem, arrays: Any) -> Any:
        if variant.name == "elsewhere":
            raise RuntimeError("no such GPU")
        added = 11 if variant.name == "off by one" else 10
        return lambda: arrays["z"].copy_(arrays["x"] + added)

    monkeypatch.setattr(run, "_gpu", lambda: ("a GPU", 90))
    monkeypatch.setattr(timing, "_clock", lambda on_gpu: Cpu())
    monkeypatch.setattr(
        timing, "_on_gpu", lambda arrays: {n: torch.from_numpy(one) for n, one in arrays.items()}
    )
    file = tmp_path / "variants.py"
    file.write_text(ON_GPU)
    language = language_of(read(file).variants[0].kernel, "compile")
    monkeypatch.setattr(language, "call", call)
    found = compare(file, limits=Limits(noise=0.5, seconds=0.1))
    assert [one.name for one in found.timed] == ["plus_ten", "of_tensors"]
    assert all(one.error is not None and one.error < 1e-7 for one in found.timed)
    assert set(found.timed[0].ratios) == {"of_tensors"}
    assert found.ceiling is None
    missing, wrong = found.notes
    assert missing == "elsewhere was not timed: no such GPU"
    assert wrong.startswith("off by one was not timed: it is wrong at the sizes that are timed: 64")
    assert str(found.variants[2].checked).startswith("WRONG against the specification")
    assert "by the GPU" in str(found.variants[2].checked)


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("base = 'mkl'", ValueError, "base names 'mkl'; there are plain, rows, "),
        ("peers = {'numpy': 3}", TypeError, "the peer numpy is 3; it must be a function"),
        ("peers = [partial(numpy)]", TypeError, "peers has functools.partial.*; name it"),
        ("peers = [numpy, refuses, numpy]", ValueError, "two variants or peers are called numpy"),
        ("variants.append(plain)", ValueError, "two variants or peers are called plain"),
        ("peers = {'rows': numpy}", ValueError, "two variants or peers are called rows"),
    ],
)
def test_what_a_file_must_not_say(
    line: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "variants.py"
    file.write_text(f"{FILE}\n{line}\n")
    with pytest.raises(error, match=words):
        read(file)
