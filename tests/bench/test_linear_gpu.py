"""The benchmark of linear layers on a GPU, as far as it goes without: data, tables and records."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("typer")

from rich.console import Console  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lowbit.cli import app  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402
from lowbit_lab.bench import Plan, Record, run  # noqa: E402
from lowbit_lab.bench.core import cuda  # noqa: E402
from lowbit_lab.bench.core.case import OURS  # noqa: E402
from lowbit_lab.bench.core.clock import Samples  # noqa: E402
from lowbit_lab.bench.core.peak import Ceiling  # noqa: E402
from lowbit_lab.bench.linear.layers import FORMATS, GpuLinearProblem, parse  # noqa: E402
from lowbit_lab.bench.linear.suite import LinearOnGpu, of_limit, ratios_page  # noqa: E402
from lowbit_lab.bench.peers import linear_gpu  # noqa: E402
from lowbit_lab.bench.suites.linear import Linear  # noqa: E402

SHAPES = ("1x256:256x384", "40x256:256x384")


class Fake(cuda.Graphs):
    """In place of a GPU: whoever comes later takes longer."""

    own_refusals = ()

    def __init__(self, device: str) -> None:
        self.copied = 0

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        yield

    def copies(self, sizes: Sequence[int]) -> list[int]:
        assert min(sizes) > 0
        return [3] * len(sizes)

    def time(self, calls: Mapping[str, Sequence[Any]], limits: Any, **_: Any) -> dict[str, Samples]:
        results = {name: [call() for call in several] for name, several in calls.items()}
        self.copied += sum(len(several) == 3 for several in calls.values())
        for several in results.values():  # all copies are the same product
            assert all(torch.equal(several[0], other) for other in several)
        taken = {name: np.full(9, 1e-6 * (n + 1)) for n, name in enumerate(calls)}
        return {name: Samples(name, one, one, 5) for name, one in taken.items()}

    def ceiling(self, isa: str, threads: int, dtype: str) -> Ceiling:
        ways = {"bfloat16": 1e3, "int8": 2e3, "float8": 2e3}
        return Ceiling("", 0, "a product", 1e3, 1e3, ways, {"memory": 60.0}, (), dtype)

    def tidy(self) -> None:
        pass

    def context(self, plan: Plan) -> dict[str, Any]:
        return {"gpu": "none", "versions": {"torch": "0"}}


deep_fixtures = ("record",)


@pytest.fixture(scope="module")
def record() -> Record:
    with pytest.MonkeyPatch.context() as patch:
        clock = Fake("")
        patch.setattr(LinearOnGpu, "clock", lambda self: clock)
        patch.setattr(linear_gpu.LowbitGpuLinear, "runs_on", lambda self, case: "a kernel")
        suite = LinearOnGpu("cpu", SHAPES, tuple(FORMATS), "/nowhere.so")
        made = run(suite, Plan(cold=True, limits=suite.limits))
        assert clock.copied > 0
    return made


@pytest.mark.deep
def test_everybody_is_right_and_timed_warm_and_cold(record: Record) -> None:
    kinds = {(row.dtypes, row.case, row.weights) for row in record.rows if row.kind == OURS}
    assert kinds == {(f, s, w) for f in FORMATS for s in SHAPES for w in ("warm", "cold")}
    assert all(row.error is not None and row.error < 0.01 for row in record.rows)
    names = {row.implementation for row in record.rows if row.dtypes == "int8"}
    assert names == {
        "lowbit", "lowbit, x quantized in each call", "cuBLAS bf16", "torch _int_mm",
    }  # fmt: skip
    assert all(row.threads is None for row in record.rows)


def test_whoever_is_missing_is_told_of(record: Record) -> None:
    reasons = {(one.implementation, one.dtypes): one.reason for one in record.absent}
    assert reasons["Machete", "w4a16"] == "there is no file /nowhere.so"
    assert "gemlite is not installed" in reasons["GemLite", "w4a16"]
    assert ("Machete", "int8") not in reasons
    assert "int8" in {dtypes for _, dtypes in reasons}
    assert linear_gpu.Machete("").available(parse(["w4a16"], SHAPES)[0]) == (
        "its library is not given: --library FILE"
    )
    few, many = parse(["w4a16"], ("256x256:256x384", "257x256:256x384"))
    tiny = linear_gpu.TinyGemm()
    assert tiny.available(few) is None
    assert "not timed beyond 256 rows" in str(tiny.available(many))


def test_shares_of_limits_and_ratios(record: Record) -> None:
    rows = [row for row in record.rows if row.dtypes == "w4a16" and row.implementation == "lowbit"]
    (few_warm, few_cold, many_warm, _) = rows
    assert few_warm.operations == 2 * 256 * 384
    assert few_warm.weight_bytes == 256 * 384 // 2 + 2 * 384 * 4
    assert of_limit(record, few_warm) == pytest.approx(few_warm.gops / 1e3)
    assert of_limit(record, few_cold) == pytest.approx(few_cold.gbs / 60)
    assert many_warm.peak_share is None  # beyond what was measured
    assert of_limit(record, many_warm) is None
    ints = next(r for r in record.rows if r.dtypes == "int8" and r.implementation == "lowbit")
    assert ints.peak_share == pytest.approx(ints.gops / 2e3)
    against = {(one["dtypes"], one["weights"], one["implementation"], one["M"]): one
               for one in record.summary}  # fmt: skip
    assert against["w4a16", "cold", "cuBLAS bf16", 40]["geometric_mean"] == pytest.approx(2)
    assert against["int8", "cold", "cuBLAS bf16", 1]["worst_shape"] == SHAPES[0]


def test_the_text_and_the_page(record: Record) -> None:
    assert Record.from_json(record.to_json()) == record
    text = io.StringIO()
    Console(file=text, width=170).print(LinearOnGpu("cpu").render(record))
    shown = text.getvalue()
    assert "limits, as measured (a product): 0.06 TB/s read, TFLOP/s: bfloat16 1.00" in shown
    assert "w4a16: weights of 4 bits in groups of 128" in shown
    assert "not run: Machete: there is no file /nowhere.so" in shown
    by_weight, by_peer, *_ = ratios_page(record)
    assert by_weight.splitlines() == [
        "| w4a16, N×K \\ M | 1 | 40 |", "| --- | --: | --: |", "| 384×256 | 2.00 | 2.00 |"
    ]  # fmt: skip
    assert by_peer.splitlines()[2] == "| cuBLAS bf16 | 2.00 (2.00) | 2.00 (2.00) |"


PAGES = {
    "h200-linear-w4a16.json": ["w4a16"],
    "h200-linear-w4a16-2.json": ["w4a16"],
    "h100-linear-w4a16.json": ["w4a16"],
    "h200-linear-8-bits.json": ["w8a16", "int8", "fp8,"],
    "h200-linear-w4a8.json": ["w4a8,", "w4a8 fp8,"],
}
"""By record: how its tables begin that the page holds."""


@pytest.mark.parametrize("name", PAGES)
def test_the_page_holds_the_tables_of_records(name: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "gpu-int4.md").read_text()
    record = Record.from_json((docs / "records" / name).read_text())
    for table in ratios_page(record):
        if table.startswith(tuple(f"| {one}" for one in PAGES[name])):
            assert table in text, f"the page does not hold this:\n{table}"


def test_4_bit_words_of_other_libraries() -> None:
    task = GpuLinearProblem.make(parse(["w4a16"], SHAPES)[0], 0, torch.device("cpu"))
    words = linear_gpu.Machete("").words(task)
    assert words.shape == (256 // 8, 384)
    held = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(256, 384)
    assert torch.equal(held.T, task.values.int())


class Operators:
    """In place of the operators of a library: products of what was packed."""

    def __init__(self) -> None:
        self.packed: Any = None

    def machete_prepack_B(self, words: Any, kind: Any, code: int, scales: Any) -> Any:
        assert words.stride() == (1, len(words))
        return words

    def machete_mm(self, x: Any, words: Any, code: int, out: Any, scales: Any, zeros: Any,
                   group_size: int, *rest: Any) -> Any:  # fmt: skip
        assert rest == (None, None, None)
        values = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(-1, words.shape[1])
        wide = scales.double().repeat_interleave(group_size, 0)
        return (x.double() @ ((values - 8) * wide)).to(out)

    def cutlass_scaled_mm(self, out: Any, x: Any, w: Any, left: Any, right: Any, bias: Any) -> None:
        out.copy_((x.double() * left) @ (w.double() * right.T))


def test_what_a_library_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = Operators()
    monkeypatch.setattr(linear_gpu, "_loaded", lambda path: given)
    for one, format in ((linear_gpu.Machete("x"), "w4a16"), (linear_gpu.Cutlass("x"), "int8")):
        task = GpuLinearProblem.make(parse([format], SHAPES)[1], 0, torch.device("cpu"))
        result = one.prepare(task, 1).call()
        assert task.error(result) < 0.01
    monkeypatch.undo()
    file = tmp_path / "empty.so"
    file.write_bytes(b"nothing")
    with pytest.raises(OSError, match="empty"):
        linear_gpu._loaded(str(file))


def test_options_ask_for_a_suite() -> None:
    suite = Linear(device="cuda", formats="int8,fp8 blocks", shapes=SHAPES)
    assert suite.resolved() == LinearOnGpu("cuda", SHAPES, ("int8", "fp8 blocks"))
    assert Linear(device="cuda:1").resolved() == LinearOnGpu("cuda:1")
    assert len(LinearOnGpu().cases()) == 7 * 6 * 12
    plain = Linear()
    assert plain.resolved() is plain
    with pytest.raises(ValueError, match="no format is called 'w5'"):
        Linear(device="cuda", formats="w5").resolved()
    with pytest.raises(ValueError, match="give --device cuda too"):
        Linear(formats="int8").resolved()
    with pytest.raises(ValueError, match="multiples of 128"):
        Linear(device="cuda", shapes=("1x200:200x256",)).resolved()
    with pytest.raises(ValueError, match="groups of 128"):
        Linear(device="cuda", group_size=32).resolved()


def explained(*words: str) -> str:
    result = CliRunner().invoke(app, ["explain", "linear", *words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_an_explanation_of_a_gpu_that_is_not_here() -> None:
    text = explained("64x4096:4096x14336", "--device", "nvidia h200")
    assert text.startswith("linear w4a16 64x4096:4096x14336 on NVIDIA H200 kernel many_rows_kernel")
    assert "rejected few_rows_kernel: x has 64 rows, and it takes 32" in text
    assert "chosen by the rule; no table has these sizes" in text
    table = explained("64x28672:28672x8192", "--device", "nvidia h200")
    assert "chosen 1.08 times as fast as the rule when measured, by lowbit's table" in table
    assert "programs 224, 1.70 for each multiprocessor" in text
    assert "33,554,432 bytes at the measured 4287 GB/s of memory" in text
    assert text.endswith("limited by compute")
    whole = ["1024x4096:4096x1024", "--format", "fp8", "--device", "NVIDIA H200"]
    assert "kernel cuBLAS: is at the limit of the hardware there" in explained(*whole)
    assert "at the measured 1546047 GOP/s (float8)" in explained(*whole)
    found = json.loads(explained(*whole, "--json", "-"))
    assert found["reached"] is None
    assert found["prediction"]["seconds"] == found["prediction"]["compute_seconds"]
    assert found["choice"]["kernel"] == "cuBLAS"


def test_an_explanation_of_a_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit_lab.explain import layer

    monkeypatch.setattr(layer, "Graphs", Fake)
    monkeypatch.setattr(layer, "gpu_of", lambda device: Gpu(90, 132, "Some GPU"))
    monkeypatch.setattr(layer.torch, "device", lambda device: "cpu")
    found = layer.explain_linear("40x256:256x384", "int8", "cuda")
    assert found.measured is not None
    assert found.ceiling.gops == 2e3
    assert found.reached is None  # faster than the limits that the clock told
    assert found.programs == 6
    with pytest.raises(ValueError, match=r"or a GPU of a table: NVIDIA H100.*NVIDIA H200"):
        layer.explain_linear("40x256:256x384", "int8", "A100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
@pytest.mark.parametrize(
    "words",
    ["bench linear --device cuda", "bench tune", "explain linear 1x128:128x128 --device cuda"],
)
def test_without_a_gpu_one_line_and_exit_code_2(words: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert result.output.startswith("lowbit: there is no GPU")
    assert result.output.count("\n") == 1
