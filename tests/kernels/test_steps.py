"""The steps of int8 and float32 products: right on every instruction set that they claim, compiled
where it runs here and interpreted everywhere, at odd shapes, within their arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("jaxtyping")

from lowbit import isa as instruction_sets
from lowbit.spec import Case
from lowbit.spec.operations.products import product_of_floats
from lowbit_lab.steps.registry import Array, Step, steps

LADDERS = ("cpu-int8", "cpu-float32")
EVERY = [one for ladder in LADDERS for one in steps(ladder)]
EACH = pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
CLAIMS = [pytest.param(one, isa, id=f"{one.name}-{isa}") for one in EVERY for isa in one.isas]
SHAPES = [(1, 1, 1), (3, 17, 5), (9, 49, 33), (33, 97, 65)]
BEYOND, POISON = 3, 7


def stated(one: Step, shape: tuple[int, int, int]) -> Case:
    return one.layout.operation.case(dict(zip("MNK", shape, strict=True)))


@cache
def drawn(one: Step, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Operands over the full range, its ends among them: where bytes saturate, they do here."""
    inputs = stated(one, shape).inputs()
    a, b = inputs["a"].copy(), inputs["b"].copy()
    if a.dtype == np.uint8:
        a[0], b[:, 0], b[:, -1] = 255, -128, 127
    return a, b


def right(one: Step, shape: tuple[int, int, int], out: Array) -> None:
    a, b = drawn(one, shape)
    verdict = stated(one, shape).expect({"a": a, "b": b}).check(out)
    assert verdict.ok, verdict.message


def output(one: Step, shape: tuple[int, int, int]) -> Array:
    """Poison, of which the middle is to be written."""
    dtype = np.float32 if one.ladder == "cpu-float32" else np.int32
    return np.full((shape[0] + 2, shape[1] + 2 * BEYOND), POISON, dtype)


def inside(whole: Array) -> Array:
    return whole[1:-1, BEYOND:-BEYOND]


def untouched(whole: Array) -> bool:
    inside(whole)[:] = POISON
    return bool((whole == POISON).all())


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled(one: Step, shape: tuple[int, int, int]) -> None:
    have = [name for name in one.isas if name in instruction_sets.available()]
    if one.isas and not have:
        pytest.skip(f"no {' or '.join(one.isas)} here")
    arranged = one.layout.arrange(*drawn(one, shape))
    before = [each.copy() for each in arranged]
    for isa in have or [None]:
        whole = output(one, shape)
        one.run(*arranged, inside(whole), isa)
        right(one, shape, inside(whole))
        assert untouched(whole)
    for each, old in zip(arranged, before, strict=True):
        np.testing.assert_array_equal(each, old)


@pytest.mark.parametrize(("one", "isa"), CLAIMS)
def test_interpreted(one: Step, isa: str) -> None:
    """Every access is checked, and each tile's edge is met."""
    for shape in SHAPES[:3]:
        arranged = one.layout.arrange(*drawn(one, shape))
        whole = output(one, shape)
        out = inside(whole)
        given = (*arranged, out, whole.shape[1], *shape[:2], arranged[0].shape[1])
        arguments = dict(zip(one.kernel.types, given, strict=True))
        one.kernel.interpret(instruction_sets.named(isa), arguments)
        right(one, shape, out)
        assert untouched(whole)


@pytest.mark.parametrize("k", [64, 2048])
def test_largest_sums_do_not_saturate(k: int) -> None:
    a, b = np.full((3, k), 255, np.uint8), np.full((k, 5), -128, np.int8)
    b[:, 1] = 127
    for one in steps("cpu-int8"):
        if not one.isas or {*one.isas} & {*instruction_sets.available()}:
            made = one.prepare(a, b)()
            np.testing.assert_array_equal(made, a.astype(np.int64) @ b.astype(np.int64))


def test_each_claims_what_it_is_for_and_says_what_it_moves() -> None:
    for ladder in LADDERS:
        several = steps(ladder)
        assert [one.number for one in several] == list(range(1, len(several) + 1))
        assert len({one.idea for one in several}) == len(several)
        for one in several:
            text = " ".join(one.text.split())
            assert "Bytes: " in text, one.name
            assert "Limit: " in text, one.name
    last = steps("cpu-int8")[-1]
    assert last.isas == ("amx",)
    with pytest.raises(RuntimeError, match="int8_tiles is written for amx, and this is generic"):
        last.serving("generic")
    with pytest.raises(ValueError, match="no steps are called 'int9'; known: uint4, cpu-int8"):
        steps("int9")


SIMULATED = """
import numpy as np
from lowbit_lab.steps.gpu import threads
from lowbit_lab.steps.registry import LADDERS
from lowbit.spec.operations.products import product_of_floats

for one in sorted(LADDERS["gpu"]._things.values(), key=lambda one: one.number):
    for m, n, k in ((3, 18, 5), (18, 3, 17)):
        case = product_of_floats.case({"M": m, "N": n, "K": k})
        inputs = case.inputs()
        whole = np.full((m + 2, n), 7, np.float32)
        one.run(inputs["a"], inputs["b"], whole[1:-1])
        verdict = case.expect(inputs).check(whole[1:-1])
        assert verdict.ok, (one.name, verdict.message)
        assert (whole[[0, -1]] == 7).all(), one.name
    print(one.name)
"""


@pytest.mark.slow
def test_threads_of_a_gpu_are_simulated() -> None:
    environment = {
        **os.environ,
        "NUMBA_ENABLE_CUDASIM": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SIMULATED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ["one_thread_each", "coalesced", "shared_memory", "register_tile"]
    assert done.stdout.split() == names


@pytest.mark.slow
def test_tiles_of_a_gpu_are_interpreted_and_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a grid of several tiles; and for a GPU that is not here with the instructions meant."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from lowbit.kernels.triton.ahead import compile_ahead
    from lowbit_lab import interpreter
    from lowbit_lab.steps.gpu import tiles

    case = product_of_floats.case({"M": 130, "N": 129, "K": 33})
    inputs = case.inputs()
    for launch in (tiles.compiled_tiles, tiles.tensor_cores):
        out = torch.full((130, 129), float("nan"))
        with interpreter():
            launch(torch.from_numpy(inputs["a"]), torch.from_numpy(inputs["b"]), out)
        verdict = case.expect(inputs).check(out.numpy())
        assert verdict.ok, verdict.message

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    arguments: dict[str, Any] = dict.fromkeys(("a_ptr", "b_ptr", "out_ptr"), "*fp32")
    arguments |= dict.fromkeys("MNK", "i32")
    arguments |= {"B_M": 128, "B_N": 128, "B_K": 32, "GROUP": 8}
    for precision, instruction, has in (("ieee", "FFMA", True), ("tf32x3", "HGMMA", True)):
        made = compile_ahead(
            tiles.product_kernel, {**arguments, "PRECISION": precision}, 90, num_warps=8
        )
        assert (made.count(instruction) > 0) is has, precision
        assert made.local == 0
