"""The steps of examples/steps: right on every instruction set that they are written for, compiled
where it runs here and interpreted everywhere, at odd shapes and at the ends of the range."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("jaxtyping")

from tests.test_cli import call_lowbit

from lowbit import isa as instruction_sets
from lowbit.spec import CORNERS
from lowbit_lab import CpuKernel
from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import language_of
from lowbit_lab.backends.source import Comparison, read
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.checks.cases import check_request
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.run import build, compare
from lowbit_lab.compare.toolchain import MissingToolError, library
from lowbit_lab.languages.lowbit import LowbitKernel

FOLDER = Path(__file__).parent.parent.parent / "examples" / "steps"
ON_CPU = ("int8", "float32", "uint4")
SHAPES = [(1, 1, 1), (3, 17, 5), (9, 49, 33), (33, 131, 65), (2, 65, 577)]
GUARD = 64


@cache
def steps(name: str) -> Comparison:
    return read(FOLDER / f"{name}.py")


def on_each_set(one: Variant, sets: tuple[str, ...]) -> Iterator[Variant]:
    """For each of these that it is written for; as it is, if it is of another language."""
    if not isinstance(one.kernel, CpuKernel):
        yield one
        return
    for name in one.kernel.sets:
        if name in sets:
            yield replace(one, kernel=replace(one.kernel, isa=name))


EVERY = [pytest.param(name, one, id=one.name) for name in ON_CPU for one in steps(name).variants]
CLAIMS = [
    pytest.param(one, id=f"{one.name}-{one.kernel.isa}")
    for name in ("int8", "float32")
    for each in steps(name).variants
    for one in on_each_set(each, tuple(instruction_sets.SETS))
    if isinstance(one.kernel, CpuKernel)
]


def right(one: Variant, problem: Problem, path: Path) -> None:
    """Called between guards, which stay what they were, as the operands do."""
    language, arrays = language_of(one.kernel, "compile"), problem.arrays(one)
    memory = np.full(arrays["out"].size + 2 * GUARD, 7, arrays["out"].dtype)
    arrays["out"] = memory[GUARD:-GUARD].reshape(arrays["out"].shape)
    before = {name: arrays[name].copy() for name in "ab"}
    language.call(one, build(one, problem, 90, path), problem, arrays)()
    assert problem.judge(arrays["out"], None, "a call").ok, (one.name, problem)
    assert (memory[:GUARD] == 7).all()
    assert (memory[-GUARD:] == 7).all()
    for name, old in before.items():
        np.testing.assert_array_equal(arrays[name], old)


@pytest.mark.deep(
    "narrow_sums",
    "int8_split_bytes",
    "float32_packed",
    "int8_register_tile",
    "int8_packed_pairs",
    "unpacked_tile",
    "widened_tile",
)
@pytest.mark.parametrize(("name", "one"), EVERY)
def test_compiled(name: str, one: Variant) -> None:
    """At the ends of the range too, where sums of 16 bits and pairs of bytes saturate."""
    operation, path = steps(name).large.operation, steps(name).path
    corners = CORNERS if name != "float32" else ()
    for each in on_each_set(one, instruction_sets.available()):
        for m, n, k in SHAPES:
            right(each, Problem({"M": m, "N": n, "K": k}, operation), path)
        for fill in corners:
            right(each, Problem({"M": 3, "N": 5, "K": 2048}, operation, fill=fill), path)


@pytest.mark.deep("*-avx2", "*-generic", "int8_split_bytes-*", "*-avx2_vnni")
@pytest.mark.parametrize("one", CLAIMS)
def test_interpreted(one: Variant) -> None:
    """Every access is checked, on sets that this machine need not have."""
    problem = steps(one.name.partition("_")[0]).small
    found = check_request(LowbitKernel.request(one, problem), "cpu", few=True)
    assert found.ok, str(found)
    assert found.cases >= 7


def test_a_sum_that_saturates_is_caught(tmp_path: Path) -> None:
    """Sixteen pairs of a half byte and a byte are more than 16 bits hold."""
    text = (FOLDER / "int8.py").read_text()
    file = tmp_path / "int8.py"
    file.write_text(text.replace("_NARROW = 8", "_NARROW = 16"))
    (one,) = (one for one in read(file).variants if one.name == "int8_split_bytes")
    request = LowbitKernel.request(one, read(file).small)
    found = check_request(request, "cpu", few=True, stop=True)
    assert f"expected {255 * 127 * 70}" in str(found.findings[0])


@pytest.mark.parametrize("one", steps("uint4").variants, ids=lambda one: one.name)
def test_indices_of_numba_stay_within_arrays(one: Variant) -> None:
    from numba import njit

    problem = replace(steps("uint4").large, sizes={"M": 3, "N": 65, "K": 577})
    checked = replace(one, kernel=njit(boundscheck=True)(one.kernel.py_func))
    right(checked, problem, steps("uint4").path)


@pytest.mark.parametrize("name", [*ON_CPU, "gpu"])
def test_each_has_an_idea_and_says_what_it_moves(name: str) -> None:
    if name == "gpu":
        pytest.importorskip("triton")
    ideas = set[str]()
    for one in steps(name).variants:
        language = language_of(one.kernel, "compile")
        text = " ".join((getattr(language.function(one.kernel), "__doc__", "") or "").split())
        assert "Bytes: " in text, one.name
        assert "Limit: " in text, one.name
        ideas.add(language.idea(one.kernel))
    assert "" not in ideas
    assert len(ideas) == len(steps(name).variants)


SMALL = {"M": 9, "N": 33, "K": 70}


@pytest.mark.deep
def test_times_stand_beside_errors_and_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step that is written for no set that runs here is left out, with the reason."""
    pytest.importorskip("threadpoolctl")
    monkeypatch.setattr(instruction_sets, "active", lambda name=None: instruction_sets.GENERIC)
    quick = Limits(noise=0.5, seconds=0.2)
    found = compare(FOLDER / "int8.py", SMALL, limits=quick)
    assert found.ok
    timed = [one for one in found.variants if one.seconds]
    assert [one.name for one in timed] == [
        "int8_loops", "int8_loop_order", "int8_blocks", "int8_register_tile", "int8_packed_pairs",
    ]  # fmt: skip
    assert "int8_tiles was not timed: it is written for amx, and this is generic" in found.notes
    assert found.ceiling is not None
    assert (found.ceiling.dtype, found.ceiling.threads) == ("int8", 1)
    peers = {one.name: one for one in found.peers}
    assert peers["lowbit"].error == peers["numpy fp32"].error == 0
    assert set(peers["lowbit"].ratios) == {"numpy fp32"}
    for one in timed:
        assert one.error == 0
        assert set(one.ratios) == {"numpy fp32", "lowbit"}
        assert one.idea
        low, middle, high = one.ratios["lowbit"]
        assert low <= middle <= high
        # Who is faster has a ratio above 1.
        assert one.seconds is not None
        assert peers["lowbit"].seconds is not None
        if one.seconds[0] > peers["lowbit"].seconds[2]:
            assert middle < 1


@pytest.mark.deep
def test_command(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--shape", "M=9,N=33,K=70", "--no-peers", "--time-limit", "0.2", "--json", str(file)]
    done = call_lowbit("compare", str(FOLDER / "float32.py"), *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["peers"] == []
    assert record["variants"][0]["ratios"] == {}
    assert set(record["variants"][1]["ratios"]) == {"float32_loops"}
    assert 0 < record["variants"][1]["error"] < 1e-5
    assert record["ceiling"]["dtype"] == "float32"
    for words in (
        "times as fast as",
        "float32_loops",
        "% of peak",
        "Three loops,",
        "peak:",
    ):
        assert words in done.stdout


def test_the_old_command_names_the_new_one() -> None:
    done = call_lowbit("steps", "cpu-int8")
    assert done.returncode == 2
    assert "`lowbit steps` is `lowbit compare examples/steps/FILE.py` now" in done.stderr


SIMULATED = """
import sys
from pathlib import Path

import numpy as np
from lowbit.spec import Case
from lowbit_lab.backends.source import load

file = load(Path(sys.argv[1]))
for one in file.variants[:4]:
    for m, n, k in ((3, 18, 5), (18, 3, 17)):
        sizes = {"M": m, "N": n, "K": k}
        case = Case(file.spec, sizes)
        inputs = case.inputs()
        whole = np.full((m + 2, n), 7, np.float32)
        one.kernel[one.grid(sizes), file.block](inputs["a"], inputs["b"], whole[1:-1])
        verdict = case.expect(inputs).check(whole[1:-1])
        assert verdict.ok, (one, verdict.message)
        assert (whole[[0, -1]] == 7).all(), one
    print(one.kernel.fn.__name__)
"""


@pytest.mark.deep
def test_threads_of_a_gpu_are_simulated() -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "NUMBA_ENABLE_CUDASIM": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SIMULATED, str(FOLDER / "gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ["one_thread_each", "coalesced", "shared_memory", "register_tile"]
    assert done.stdout.split() == names


def has(name: str) -> bool:
    try:
        library(name)
    except MissingToolError:
        return False
    return True


@pytest.mark.deep
def test_steps_of_a_gpu_are_right_and_compiled_as_meant() -> None:
    """For a GPU that is not here, with what each step is about."""
    pytest.importorskip("triton")
    found = {one.name: one for one in compare(FOLDER / "gpu.py", time=False, sm=90).variants}
    for name, instruction in (("compiled_tiles", "FFMA"), ("tensor_cores", "HGMMA")):
        one: Any = found[name]
        assert one.checked.ok, one.checked
        assert one.machine.stack == 0
        opcodes = {each.opcode.partition(".")[0] for each in one.machine.sass.instructions}
        assert instruction in opcodes
    if not has("libnvvm"):
        pytest.skip("NVVM is not installed")
    assert all(one.checked.ok for one in found.values())
    waste = {name: [a.waste for a in one.accesses if not a.stores] for name, one in found.items()}
    assert max(waste["one_thread_each"]) > 2 * max(waste["coalesced"])
