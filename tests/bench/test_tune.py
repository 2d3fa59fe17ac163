"""Tuning of GPU products, as far as it goes without a GPU: what is tried, which entries come of it,
tables and their locks."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from lowbit.kernels.triton.fast import tables  # noqa: E402
from lowbit.kernels.triton.fast.few_rows import FewRowsConfig  # noqa: E402
from lowbit.kernels.triton.fast.launch import Config, Gpu, forget_choices  # noqa: E402
from lowbit.kernels.triton.fast.many_rows import ManyRowsConfig  # noqa: E402
from lowbit.kernels.triton.fast.scaled import ScaledConfig  # noqa: E402
from lowbit.kernels.triton.fast.weight_only import weight_only_choice  # noqa: E402
from lowbit_lab.bench.core.case import Case  # noqa: E402
from lowbit_lab.bench.linear import layers, tune  # noqa: E402

GPU = Gpu(90, 132, "NVIDIA Test 9")
CPU = torch.device("cpu")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path))
    tables._known.cache_clear()
    forget_choices()
    yield tmp_path
    tables._known.cache_clear()
    forget_choices()


def _case(format: str, sizes: tuple[int, int, int]) -> Case:
    M, N, K = sizes
    return layers.parse([format], [f"{M}x{K}:{K}x{N}"])[0]


@pytest.mark.parametrize("format", layers.TUNED)
@pytest.mark.parametrize("sizes", [(1, 128, 128), (33, 384, 256)])
def test_layers_are_right_and_wrong_results_are_found(
    format: str, sizes: tuple[int, int, int]
) -> None:
    task = layers.GpuLinearProblem.make(_case(format, sizes), 0, CPU)
    z = layers.multiplied(task, *layers.copied(layers.packed(task)))
    assert task.wrong(None, z) is None
    assert 0 < task.error(z) < 0.01
    z[0, 5] += task.ideal.abs().max() / 2
    assert "1 elements are beyond the budget" in str(task.wrong(None, z))
    z[0, 5] = torch.nan
    assert "1 elements" in str(task.wrong(None, z))
    assert "shape" in str(task.wrong(None, z[:, 1:]))


@pytest.mark.parametrize("format", layers.TUNED)
def test_all_candidates_fit(format: str) -> None:
    shapes = [(M, N, K) for N, K in ((4096, 4096), (384, 640)) for M in (1, 16, 64, 4096)]
    for one in tune.wanted((_case(format, sizes) for sizes in shapes), GPU):
        rule, *others = one.configs
        assert len(set(one.configs)) == len(one.configs)
        assert all(type(config) is type(rule) for config in others)
        with tables.trying(others[0] if others else None) as trial:
            choice = layers.FORMATS[format].choice(GPU, *(one.case.sizes[name] for name in "MNK"))
        assert choice.config == (others or [rule])[0]
        assert list(trial.asked) == [one.key]
        for config in others:
            assert one.case.sizes["K"] // 128 >= 4 * config.splits  # type: ignore[attr-defined]


def test_what_cannot_serve_is_no_candidate() -> None:
    sizes = 64, 4096, 4096
    found: list[Any] = tune.candidates(ManyRowsConfig(64, 64, 2, 4, 3), (4, 128), sizes, 132)
    assert found[0] == ManyRowsConfig(64, 64, 2, 4, 3)
    assert max(one.columns for one in found) == 64
    sizes = 8, 4096, 640
    found = tune.candidates(ScaledConfig(64, 16, 1, 4, 6), (2,), sizes, 132)
    assert {one.splits for one in found} == {1}  # 5 steps of 128 k cannot be cut evenly
    assert max(one.columns for one in found) == 16
    assert tune.candidates(Config(), (), sizes, 132) == [Config()]


class Clocked:
    """In place of CUDA graphs: a call takes as long as the configuration on trial says."""

    def __init__(self, calls: Sequence[Any]) -> None:
        assert tables._trial is not None
        config: Any = tables._trial.config
        self.count, self.fast = len(calls), config == FewRowsConfig(64, 1, 2, 4)

    def start(self) -> Any:
        class At:
            def __init__(self, ms: float) -> None:
                self.ms = ms

            def elapsed_time(self, end: Any) -> float:
                return end.ms - self.ms

        return At(0.0), At(1.0 if self.fast else 2.0)


@pytest.fixture
def without_gpu(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tune, "Graph", Clocked)
    monkeypatch.setattr(tune, "copies", lambda nbytes, device: 2)
    monkeypatch.setattr(tune, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "_checked", lambda jobs, tell: dict.fromkeys(jobs))
    return tables.path_of(GPU)


def _tune(rows: Sequence[int], seconds: float = 1e3, again: bool = False) -> list[tune.Point]:
    points: list[tune.Point] = []
    cases = [_case("w4a16", (M, 256, 512)) for M in rows]
    count = tune.tune(cases, CPU, seconds, lambda what, share: None, points.append, again)
    assert count == len(points)
    return points


def test_a_table_is_filled_once_and_found(without_gpu: Path) -> None:
    first, second = _tune([1, 64])
    assert first.gain == 2.0
    assert second.gain == 1.0
    about, entries = tables.read(without_gpu)
    assert about["gpu"] == GPU.name
    assert [one["gain"] for one in entries.values()] == [2.0, 1.0]
    assert _tune([1, 64]) == []
    assert len(_tune([1], again=True)) == 1
    assert len(_tune([8, 16], seconds=1e-9)) == 0
    found = weight_only_choice(GPU, 1, 256, 512)
    assert found.config == FewRowsConfig(64, 1, 2, 4)
    assert f"2.00 times as fast as the rule when measured, by {without_gpu}" in str(found)
    assert "by the rule, the fastest in" in str(weight_only_choice(GPU, 64, 256, 512))
    assert "no table has these sizes" in str(weight_only_choice(GPU, 1, 256, 640))
    assert weight_only_choice(Gpu(90, 132), 1, 256, 512).source == ""
    # Three rows are cut as four are, of which nothing is known.
    assert "no table" in weight_only_choice(GPU, 3, 256, 512).source


def test_an_entry_serves_fewer_rows_that_are_cut_into_as_many_tiles(cache_folder: Path) -> None:
    path = tables.path_of(GPU)
    config = {"rows": 64, "columns": 64, "splits": 2, "num_warps": 4, "num_stages": 4}
    key = tables.Key("many_rows_kernel", "4 bits by 128", 256, 256, 512)
    with tables.locked(path):
        tables.write(path, {}, {key: {"config": config, "gain": 1.5}})
    found = ManyRowsConfig(**config)
    for M, serves in ((256, True), (200, True), (192, False), (257, False), (5000, False)):
        assert (weight_only_choice(GPU, M, 256, 512).config == found) is serves
    other = "cuts x otherwise"
    assert other in weight_only_choice(GPU, 192, 256, 512).source


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"entries": [{}]}', '{"entries": 5}', '{"entries": [{"kernel": "a"}]}'],
)
def test_a_damaged_table_is_not_used(
    text: str, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tables.path_of(GPU)
    path.parent.mkdir()
    path.write_text(text)
    assert tables.read(path) == ({}, {})
    assert f"the table {path} is not used" in caplog.text
    assert "no table has these sizes" in weight_only_choice(GPU, 1, 256, 512).source


@pytest.mark.parametrize(
    "config", [{"rows": 96}, {"rows": "64"}, {"width": 3}, {"num_stages": 1}, {"splits": None}]
)
def test_an_entry_that_cannot_be_is_not_used(config: dict[str, Any], cache_folder: Path) -> None:
    path = tables.path_of(GPU)
    key = tables.Key("many_rows_kernel", "4 bits by 128", 256, 256, 512)
    with tables.locked(path):
        tables.write(path, {}, {key: {"config": config, "gain": 1.5}})
    choice = weight_only_choice(GPU, 256, 256, 512)
    assert choice.config == weight_only_choice(Gpu(90, 132), 256, 256, 512).config
    assert choice.source.startswith("by the rule; ")


def test_the_tables_that_come_with_lowbit_are_in_order() -> None:
    paths = sorted(tables.OWN.glob("*.json"))
    for path in paths:
        about, entries = tables.read(path)
        gpu = Gpu(90, 132, about["gpu"])
        assert tables.path_of(gpu, own=True) == path
        for key, one in entries.items():
            assert one["gain"] >= 1.03
            with tables.trying(None) as trial:
                for format in layers.FORMATS.values():
                    format.choice(gpu, key.M, key.N, key.K)
            rule, facts = trial.asked[key]
            assert replace(rule, **one["config"]).refusal(*facts) is None  # type: ignore[type-var]


def _write_many(folder: str, first: int) -> None:
    path = tables.path_of(GPU)
    for index in range(first, first + 20):
        with tables.locked(path):
            about, entries = tables.read(path)
            entries[tables.Key("kernel", "kind", 1, index, 1)] = {"config": None, "gain": 1.0}
            time.sleep(0.001)
            tables.write(path, {**about, "gpu": GPU.name}, entries)


@pytest.mark.deep
def test_processes_that_tune_at_once_lose_nothing(cache_folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_write_many, args=(str(cache_folder), 20 * i)) for i in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(tables.read(tables.path_of(GPU))[1]) == 60
    assert [one.name for one in tables.path_of(GPU).parent.iterdir() if one.suffix != ".lock"] == [
        "nvidia-test-9.json"
    ]


@pytest.mark.deep
def test_a_trial_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune.fails("w4a16", 8, 512, "cpu", FewRowsConfig(64, 1)) is None
    assert "no format is called" in str(tune.fails("w5", 8, 512, "cpu", Config()))
    monkeypatch.setattr(tune, "multiplied", lambda task, *weight: task.ideal + 1)
    assert "beyond the budget" in str(tune.fails("w4a16", 8, 512, "cpu", FewRowsConfig(64, 1)))
    monkeypatch.undo()
    jobs = [("w4a16", 8, 512, "cpu", FewRowsConfig(64, splits)) for splits in (1, 2)]
    found = tune._checked([*jobs, jobs[0]], lambda what, share: None)
    assert found == dict.fromkeys(jobs)


def test_the_command_refuses_what_is_no_shape() -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from lowbit.cli import app

    assert CliRunner().invoke(app, ["bench", "tune", "1x64"]).exit_code == 2
