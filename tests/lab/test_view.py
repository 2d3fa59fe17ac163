"""What a view holds: for kernels in Triton, Numba and lowbit, right ones and wrong ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import BFloat16, Int8, Int32, UInt8
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.isa.amx import TILES, ldtilecfg, tdpbusd, tileloadd, tilerelease, tilestored, tilezero
from lowbit.isa.generic import reduce_add
from lowbit.isa.types import Int, S8Pointer, S32Pointer, U8Pointer, s32, u8
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.triton.registry import teaching_kernels
from lowbit.spec import exercises, operation
from lowbit_lab import CpuKernel, View, check, check_file, trace_kernel, view
from lowbit_lab.explain.kernels import product_kernels
from lowbit_lab.run.trace import Access
from lowbit_lab.views.run import view_file, view_named


def blocks(meta: dict[str, Any]) -> int:
    return -(-meta["N0"] // meta["B0"])


@triton.jit
def add(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@triton.jit
def add_beyond(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i <= N0)
    tl.store(z_ptr + i, x / (x - x), mask=i < N0)


@triton.jit
def add_then_stop(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, x + tl.arange(0, 2 * B0))


def added(kernel: Any, **given: Any) -> dict[str, Any]:
    seen = view(kernel, exercises.add_constant_blocks, grid=blocks, sizes={"N0": 70}, **given)
    return json.loads(seen.json())


def test_the_data_is_the_trace() -> None:
    data = added(add)
    trace = trace_kernel(add, exercises.add_constant_blocks, grid=blocks, sizes={"N0": 70})
    assert data["programs"] == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    assert len(data["events"]) == len(trace.events) == 6
    for event, access in zip(data["events"], trace.events, strict=True):
        assert isinstance(access, Access)
        assert (event["kind"], event["tensor"]) == (access.kind, access.tensor)
        assert data["programs"][event["program"]] == list(access.program)
        assert event["elements"] == access.elements.tolist()
        assert [lane for lane, _ in event["masked"]] == np.flatnonzero(~access.active).tolist()
        assert np.array_equal(np.float32(event["values"]), access.values)
        source = data["sources"][event["line"][0]]
        assert access.place is not None
        assert event["line"][1] == access.place.line
        assert f"tl.{access.kind}" in source["lines"][access.place.line - source["first_line"]]
    x, z = data["tensors"]
    assert np.array_equal(np.float32(x["before"]) + np.float32(10), np.float32(z["after"]))
    assert (x["reads"], z["writes"]) == ([1] * 70, [1] * 70)
    assert (x["loaded_bytes"], z["stored_bytes"], z["least_bytes"]) == (280, 280, 280)
    assert (z["before"], z["wrong"], data["findings"]) == (None, [], [])


def test_a_wrong_kernel() -> None:
    data = added(add_beyond)
    load = data["events"][-2]
    assert load["outside"] == [[6, 70]]
    assert load["values"][6] == "nan"
    assert data["tensors"][0]["outside_lanes"] == 1
    assert data["tensors"][1]["wrong"] == list(range(70))
    assert set(data["tensors"][1]["after"]) <= {"inf", "-inf", "nan"}
    kinds = [finding["kind"] for finding in data["findings"]]
    assert kinds == ["out-of-bounds-load", "wrong-values"]
    assert data["findings"][0]["line"] == load["line"]


def test_a_kernel_that_stops() -> None:
    data = added(add_then_stop)
    assert [event["kind"] for event in data["events"]] == ["load"]
    crash = data["findings"][-1]
    assert crash["kind"] == "crash"
    assert crash["program"] == [0, 0, 0]
    assert data["tensors"][1]["after"] == [None] * 70


def test_reductions_and_products_know_their_loads() -> None:
    sums = view_named("long_sum", {"N0": 2, "T": 40}).data["events"]
    first = next(event for event in sums if event["kind"] == "reduction")
    assert first["name"] == "sum along axis 1"
    load = sums[first["operands"][0]["source"]]
    assert load["values"] == first["operands"][0]["values"]
    total = np.sum(np.float32(load["values"]), dtype=np.float32)
    assert np.isclose(first["result"]["values"][0], total, rtol=1e-5)
    taught = teaching_kernels()["quantized_matmul"]
    sizes = {"N0": 5, "MID": 64, "N1": 3}
    products = view(taught.kernel, taught.operation, grid=taught.grid, sizes=sizes).data["events"]
    product = next(event for event in products if event["kind"] == "product")
    left, right = product["operands"]
    # The left operand is made of three loads, so that it comes from none of them.
    assert (left["source"], products[right["source"]]["tensor"]) == (None, "activation")
    factors = [np.float32(one["values"]).reshape(one["shape"]) for one in (left, right)]
    wanted = factors[0] @ factors[1]
    assert np.allclose(wanted.reshape(-1), product["result"]["values"], rtol=1e-5, atol=1e-5)


@triton.jit
def halves(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i < N0)
    tl.store(z_ptr + i, (x.to(tl.float32) * 0.5).to(tl.bfloat16), mask=i < N0)


def half(x: BFloat16[np.ndarray, "N0"]) -> BFloat16[np.ndarray, "N0"]:
    return x / 2


def test_bfloat16_is_shown_as_numbers() -> None:
    data = view(halves, half, grid=blocks, sizes={"N0": 33}, B0=16).data
    x, z = data["tensors"]
    assert np.array_equal(np.float32(x["before"]) / 2, np.float32(z["after"]))
    assert data["events"][0]["values"] == x["before"][:16]
    assert z["wrong"] == []


def test_what_is_cut_is_said_and_still_counted() -> None:
    whole, cut = added(add), added(add, limit=100)
    assert (len(cut["events"]), cut["dropped"]) == (3, 3)
    assert "The steps end after the first 3: 3 more were not recorded" in cut["notes"][0]
    assert cut["tensors"] == whole["tensors"]
    # Without sizes of one's own, all steps are shown of something smaller.
    small = view(add, exercises.add_constant_blocks, grid=blocks, limit=100).data
    assert (small["sizes"], small["dropped"]) == ({"N0": 50}, 0) or small["sizes"]["N0"] < 50
    assert small["notes"] == ["Shrunk, to show all steps: the exercise has N0=200."]


@operation(exercise={"R": 3, "T": 40}, summed=("T",))
def row_sum(a: UInt8[np.ndarray, "R T"]) -> Int32[np.ndarray, "R"]:
    """z_r = Σ_t a_rt."""
    return a.sum(axis=1)


@kernel
def row_sums(k: Builder, a: U8Pointer, z: S32Pointer, R: Int, T: Int, *, lanes: int) -> None:
    for r in k.parallel(R):
        with k.scope():
            total = k.register(k.zeros(s32, lanes))
            for c in k.range(0, T, lanes):
                step = k.register(k.index(c))
                total.value = total.value + (a + (r * T + step.value)).load(lanes).to(s32)
            (z + r).store(reduce_add(total.value))


def held(data: dict[str, Any], now: int) -> dict[int, Any]:
    """What registers hold at an event, as the page works it out."""
    values: dict[int, Any] = {}
    for change in data["changes"]:
        if change["event"] <= now:
            values[change["register"]] = change["values"]
    return {register: one for register, one in values.items() if one is not None}


def test_registers_of_a_lowbit_kernel() -> None:
    data = view(CpuKernel(row_sums, "avx2", {"lanes": 8}), row_sum).data
    assert data["machine"]["vector_registers"] == 16
    assert data["program_axes"] == [["region", 1], ["item", 1]]
    a = np.array(data["tensors"][0]["before"]).reshape(3, 40)
    events = data["events"]
    assigned = [i for i, one in enumerate(events) if one["kind"] == "assignment"]
    assert len(assigned) == 3 * (1 + 5)
    for now in assigned:
        live = {data["registers"][r]["name"]: values for r, values in held(data, now).items()}
        row = data["programs"][events[now]["program"]][1]
        loads = [e for e in events[: now + 1] if e["kind"] == "load"]
        blocks_read = len([e for e in loads if e["program"] == events[now]["program"]])
        summed = a[row, : 8 * blocks_read].reshape(-1, 8).sum(axis=0)
        assert live["total"] == summed.tolist()
        if blocks_read:
            assert live["step"] == [8 * blocks_read - 8]
    stored = [i for i, one in enumerate(events) if one["kind"] == "store"]
    for now in stored:  # the loop's variable is gone by then
        assert [data["registers"][r]["name"] for r in held(data, now)] == ["total"]
    assert {data["registers"][r]["slots"] for r in held(data, stored[0])} == {1}


@operation(exercise={"M": 5, "K": 128}, summed=("K",), multiple_of={"K": 64})
def packed_product(
    a: UInt8[np.ndarray, "M K"], b: Int8[np.ndarray, "K//4 64"]
) -> Int32[np.ndarray, "M 16"]:
    """z = a @ b; a line of b holds four rows of 16, the four of a column side by side."""
    return a @ b.reshape(-1, 16, 4).transpose(0, 2, 1).reshape(-1, 16)


@kernel
def tile_product(k: Builder, a: U8Pointer, b: S8Pointer, z: S32Pointer, M: Int, K: Int) -> None:
    config = k.local(u8, 64)
    config.store(k.zeros(u8, 64))
    config.store(k.constant(1, u8))
    for number in range(TILES):
        (config + (16 + 2 * number)).store(k.constant(64, u8))
        (config + (48 + number)).store(k.constant(16, u8) if number == 2 else M.to(u8))
    tiles = [k.tile(i) for i in range(TILES)]
    ldtilecfg(config, *tiles)
    tilezero(tiles[0])
    for line in k.range(0, K // 64):
        tileloadd(tiles[1], a + line * 64, K)
        tileloadd(tiles[2], b + line * 1024, k.index(64))
        tdpbusd(tiles[0], tiles[1], tiles[2])
    tilestored(tiles[0], z, k.index(64))
    tilerelease(*tiles)


def test_tiles_of_a_lowbit_kernel() -> None:
    data = view(CpuKernel(tile_product, "amx"), packed_product).data
    assert data["findings"] == []
    steps = [(event["kind"], event.get("name", event.get("tensor"))) for event in data["events"]]
    line = [("load", "a"), ("load", "b"), ("instruction", "tdpbusd")]
    start = [("instruction", "ldtilecfg"), ("instruction", "tilezero")]
    assert steps == [*start, *line, *line, ("store", "z"), ("instruction", "tilerelease")]
    # The rows that an instruction loads are one step.
    assert data["events"][2]["shape"] == [5, 64]
    assert data["events"][3]["shape"] == [16, 64]
    assert {data["sources"][event["line"][0]]["file"] for event in data["events"]} == {
        Path(__file__).name
    }
    product = data["events"][7]
    assert [block["source"] for block in product["operands"]] == [5, 6]
    assert product["operands"][1]["values"] == [v & 255 for v in data["events"][6]["values"]]
    names = {r["name"]: number for number, r in enumerate(data["registers"])}
    at_the_store = held(data, 8)
    sums = np.array(at_the_store[names["tile 0"]], np.uint8).view(np.int32)
    assert sums.tolist() == data["tensors"][2]["after"]
    assert at_the_store[names["tile 1"]] == data["events"][5]["values"]
    assert held(data, 9) == {}


@pytest.mark.parametrize("isa", product_kernels())
def test_lowbits_own_products(isa: str) -> None:
    data = view_named(f"product:{isa}", {"M": 3, "N": 16, "K": 64}).data
    assert data["findings"] == []
    a, panels, z = data["tensors"]
    right = np.array(panels["before"]).reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16)
    assert (np.array(a["before"]).reshape(3, 64) @ right).reshape(-1).tolist() == z["after"]
    assert z["writes"] == [1] * 48
    used = {register["type"] for register in data["registers"]}
    assert ("tile" in used) == (data["machine"]["tiles"] > 0)
    # What the text calls them: the frame's and the micro-kernel's variables have names.
    assert {"register"} != {register["name"] for register in data["registers"]}


NUMBA = """
from numba import cuda
from lowbit.spec.exercises import add_constant_blocks as spec

@cuda.jit
def kernel(x, z, N0):
    i = cuda.grid(1)
    if i <= N0:
        z[i] = x[i] + 10

def grid(meta):
    return -(-meta["N0"] // meta["threads"])

constants = {"threads": 8}
"""


@pytest.mark.deep
def test_threads_of_a_numba_kernel(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "mine.py"
    file.write_text(NUMBA)
    data = view_file(file, {"N0": 10}).data
    assert data["program_axes"] == [["block", 3], ["thread", 3]]
    assert [1, 0, 0, 2, 0, 0] in data["programs"]
    beyond = [event for event in data["events"] if event["outside"]]
    assert [(event["kind"], event["outside"]) for event in beyond] == [
        ("load", [[0, 10]]),
        ("store", [[0, 10]]),
    ]
    assert data["tensors"][1]["writes"] == [1] * 10
    result = check_file(file)
    assert "<iframe" in result._repr_html_()


@pytest.mark.deep
def test_a_check_shows_itself_with_the_view() -> None:
    result = check(add_beyond, exercises.add_constant_blocks, grid=blocks, device="cpu")
    assert result.viewer is not None
    first = next(finding for finding in result.findings if finding.sizes)
    assert first.sizes == {"N0": 200}
    seen = result.viewer().data
    assert seen["sizes"] == {"N0": 1}
    assert seen["findings"][0]["kind"] == first.kind
    assert seen["notes"][0].startswith("check found first, with N0=200: reads outside of a tensor.")
    shown = result._repr_html_()
    assert "reads outside of a tensor" in shown.partition("<iframe")[0]
    assert "srcdoc=" in shown.partition("<iframe")[2]
    assert "viewer" not in json.loads(result.to_json())
    right = check(add, exercises.add_constant_blocks, grid=blocks, device="cpu")
    assert right.viewer is not None
    assert right.viewer().data["sizes"] == {"N0": 200}


def test_the_page_is_whole_and_holds_the_data() -> None:
    seen = View({**added(add), "doc": "</script><script>alert(1)</script><!--"})
    page = seen.html()
    assert page.count("</script>") == 2
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == seen.data
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(""", page)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": {"T": 3}}, "add_constant_blocks has no size 'T'; it has N0"),
        ({"sizes": {"N0": 0}}, "the size N0 is 0; give at least 1"),
        ({"sizes": {"N0": 10**7}}, "20,000,000 elements, too many to draw"),
        ({"fill": "ones"}, "fill is 'ones'; it must be one of normal"),
        ({"limit": 0}, "limit is 0"),
        ({"BLOCK": 3}, "has no parameter 'BLOCK'"),
    ],
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        view(add, exercises.add_constant_blocks, grid=blocks, **given)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        view_file(Path("nowhere.py"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    done = run(app, ["view", "long_sum", "--shape", "N0=2,T=33"])
    assert done.exit_code == 0, done.output
    assert "264 bytes loaded, 8 stored; at least 272 have to be moved" in done.output
    assert "N0=2, T=33: 10 steps, 2 programs" in done.output
    once = run(app, ["view", "add_constant", "--json", "once.json"])
    assert "N0=32: 2 steps, 1 program\n" in once.output
    assert (tmp_path / "view-long_sum.html").read_text().startswith("<!doctype html>")
    both = ["--html", "a.html", "--json", "a.json", "--shape", "N0=2", "--shape", "T=33"]
    assert run(app, ["view", "long_sum", *both]).exit_code == 0
    assert (tmp_path / "a.html").exists()
    assert json.loads((tmp_path / "a.json").read_text())["sizes"] == {"N0": 2, "T": 33}
    negative = ["--json", "b.json", "--shape", "N0=2,T=33", "--fill", "negative"]
    assert run(app, ["view", "long_sum", *negative]).exit_code == 0
    assert max(json.loads((tmp_path / "b.json").read_text())["tensors"][0]["before"]) < 0
    for arguments, message in (
        (["long_sum", "--fill", "ones"], "fill is 'ones'; it must be one of normal"),
        (["long_sum", "--shape", "7"], "the shape '7' is not understood; write N0=100,T=64"),
        (["long_sum", "--shape", "N=7"], "long_sum has no size 'N'; it has N0, T"),
        (["long_sum", "--html", "no/a.html"], "no/a.html: No such file or directory"),
        (["long"], "no kernel 'long'; there are add_constant, "),
        (["long.py"], "long.py: there is no such file"),
    ):
        refused = run(app, ["view", *arguments])
        assert refused.exit_code == 2
        assert message in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
