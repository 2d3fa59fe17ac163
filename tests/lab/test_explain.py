"""Explanations: that they tell what really runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from lowbit import isa
from lowbit.isa import named
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery
from lowbit.product import dispatch, requests
from lowbit.product.prepared import Prepared
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.peers.own import LowbitMatmul, packed_weight
from lowbit_lab.bench.suites.matmul.problem import SIGNATURES, MatmulProblem
from lowbit_lab.bench.suites.matmul.problem import product as product_case
from lowbit_lab.explain import product as explain
from lowbit_lab.explain.product import Explanation, explain_gemm, prepared_of, render


@pytest.mark.parametrize("dtypes", SIGNATURES)
def test_the_product_is_the_one_that_runs(dtypes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MatmulProblem.make(product_case("9x70:70x33", dtypes), seed=3)
    ran: list[Prepared] = []
    run = Prepared.run

    def remembered(self: Prepared, *operands: Any) -> None:
        ran.append(self)
        run(self, *operands)

    monkeypatch.setattr(Prepared, "run", remembered)
    count = max_threads() + 1  # a number that is asked for is not lowered
    LowbitMatmul().prepare(problem, count).call()
    assert ran == [prepared_of(problem, packed_weight(problem), count)]


@pytest.fixture(scope="module")
def found() -> Explanation:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "_LIMITS", explain.Limits(noise=0.5, seconds=0.2))
        # The rate of memory is that of several times the last cache, which may be a gigabyte.
        caches = {"L1d": 1 << 15, "L2": 1 << 18, "L3": 1 << 20}
        patch.setattr(peak.host, "caches", lambda: caches)
        return explain_gemm("70x100:100x72", "s8:s8:f32", 1)  # signed: packed on every set


def test_it_tells_what_dispatch_chose(found: Explanation) -> None:
    # As dispatch is asked, with what is known of the weights where that can matter.
    weight = packed_weight(MatmulProblem.make(product_case("70x100:100x72", "u8:s8:f32")))
    form = requests.panel_format(weight, isa.active().name)
    query = KernelQuery(70, 72, 100, form.largest_pair, split=form.split)
    seen = dispatch.consider(isa.active(), query)
    assert seen[-1].micro is not None
    assert (found.kernel, found.isa) == (seen[-1].micro.name, seen[-1].isa.name)
    assert [(r.isa, r.why) for r in found.rejected if r.isa in {c.isa.name for c in seen}] == [
        (one.isa.name, one.why) for one in seen[:-1]
    ]
    for one in found.rejected:
        assert one.why
        if one.kernel is None and one.isa not in {c.isa.name for c in seen}:
            assert one.why == named(one.isa).missing()


def test_sizes_follow_from_layout_and_blocking(found: Explanation) -> None:
    cut = found.blocking
    step = cut.block_rows * cut.row_blocks
    rows = -(-70 // step) * step
    assert found.left is not None
    assert found.left.given_bytes == 70 * 100
    assert found.left.packed_bytes == rows * 128
    assert found.right.given_bytes == 100 * 72
    assert found.right.packed_bytes == 128 * 80
    assert found.right.padding == pytest.approx(1 - 7200 / (128 * 80))
    assert found.beside_right_bytes == 2 * 4 * 80
    guess = found.prediction
    assert guess.operations == 2 * rows * 128 * 80
    assert guess.moved_bytes == 7000 + 2 * rows * 128 + 128 * 80 + 2 * 4 * 80 + 4 * 70 * 72
    assert cut.items * cut.item_steps * step >= rows
    assert cut.threads == 1


@pytest.mark.deep
def test_rows_in_place_are_told() -> None:
    found = explain_gemm("70x100:100x8", "u8:s8:s32", threads=1)
    assert found.left is None
    assert found.prediction.moved_bytes == 7000 + 128 * 16 + 4 * 16 + 4 * 70 * 8
    with (console := Console(width=200)).capture() as captured:
        console.print(render(found))
    assert "left in place" in captured.get()


def test_the_limit_is_the_larger_time(found: Explanation) -> None:
    guess = found.prediction
    assert guess.compute_seconds == guess.operations / (found.ceiling.gops * 1e9)
    rate = found.ceiling.read_gbs[guess.level]
    assert guess.memory_seconds == guess.moved_bytes / (rate * 1e9)
    larger = {"compute": guess.compute_seconds, "memory": guess.memory_seconds}[guess.limit]
    assert guess.seconds == larger == max(guess.compute_seconds, guess.memory_seconds)
    assert found.reached == peak.share(guess.seconds / found.measured.median)


def test_the_level_is_the_nearest_that_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {"L1d": 10, "L2": 100, "L3": 1000}
    monkeypatch.setattr(peak.host, "caches", lambda: caches)
    levels = [peak.level(size, threads) for threads in (1, 2) for size in (10, 11, 200, 1001)]
    assert levels == ["L1d", "L2", "L3", "memory", "L1d", "L1d", "L2", "memory"]


def test_chunks_are_rounded_up_one_by_one() -> None:
    problem = MatmulProblem.make(product_case("1x64:64x16", "f32:s8:f32"))
    product = prepared_of(problem, packed_weight(problem), 1).request
    product = product._replace(m=5000, b=product.b._replace(k=8192))
    plan = dispatch.plan(product)
    step = plan.block_rows * plan.shape.row_blocks
    assert plan.chunk_rows < 5000
    chunks = [plan.chunk_rows] * (5000 // plan.chunk_rows) + [5000 % plan.chunk_rows]
    assert explain._packed_rows(product, plan) == sum(-(-rows // step) * step for rows in chunks)


def test_text_and_json_tell_the_same(found: Explanation) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(found))
    text = captured.get()
    parsed = json.loads(found.to_json())
    assert parsed["kernel"] in text
    assert parsed["isa"] in text
    for one in parsed["rejected"]:
        assert one["why"] in text
    for operand in (parsed["left"], parsed["right"]):
        assert f"{operand['packed_bytes']:,}" in text
    assert f"limited by {parsed['prediction']['limit']}" in text
    assert f"{parsed['ceiling']['gops']:.0f} GOP/s" in text
    assert parsed["prediction"]["seconds"] == found.prediction.seconds


def test_bad_arguments_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(ValueError, match="is not understood"):
        explain_gemm("70", "u8:s8:f32")
    with pytest.raises(ValueError, match="known are"):
        explain_gemm("2x3:3x4", "u8:s9:f32")
    with pytest.raises(ValueError, match="threads is 0"):
        explain_gemm("2x3:3x4", "u8:s8:f32", 0)
