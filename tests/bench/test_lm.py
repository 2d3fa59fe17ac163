"""Language models in libraries: files of random weights, what contenders compute, and a run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from language_models import smollm2

pytest.importorskip("rich")
gguf = pytest.importorskip("gguf")

from remote_here import RemoteHere  # noqa: E402

from lowbit.lm import LanguageModel  # noqa: E402
from lowbit_lab.bench import Plan, Record, run  # noqa: E402
from lowbit_lab.bench.core import cpu  # noqa: E402
from lowbit_lab.bench.core.case import Implementation, find  # noqa: E402
from lowbit_lab.bench.core.clock import Limits, RemoteCall, interleave  # noqa: E402
from lowbit_lab.bench.lm import contender, shapes  # noqa: E402
from lowbit_lab.bench.lm.contender import PERPLEXITY, PROMPT, TEXT, Contender, ModelWork, memory  # noqa: E402
from lowbit_lab.bench.suites import lm  # noqa: E402

SHAPE = shapes.Shape(layers=2, width=64, heads=4, key_heads=2, hidden=96, vocabulary=160)
QUICK = Limits(seconds=0.01, least_rounds=3)
OTHERS = ("llama.cpp", "transformers f32", "transformers bf16")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    shapes.write(path, SHAPE, "Q4_1")
    return path


def work(path: Path, operation: str = TEXT, sequences: int = 2) -> ModelWork:
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocabulary, (sequences, 9)).tolist()
    return ModelWork(operation, str(path), tokens, 5, 1)


def loaded(name: str, task: ModelWork) -> Any:
    contender = find("lm", name)
    assert isinstance(contender, Contender)
    if reason := contender.available(None):
        pytest.skip(reason)
    return contender.open(task)


def test_a_file_of_random_weights(path: Path) -> None:
    model = LanguageModel.load(path)
    assert model.vocabulary == SHAPE.vocabulary
    reader = gguf.GGUFReader(path)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.1.ffn_down.weight"] == kinds["token_embd.weight"] == "Q4_1"
    assert kinds["output_norm.weight"] == "F32"
    weight = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight")
    assert gguf.dequantize(weight.data, weight.tensor_type).std() == pytest.approx(0.02, rel=0.05)


def test_the_billion_of_llama() -> None:
    shape = shapes.SHAPES["llama-1b"]
    assert sum(rows * columns for _, (rows, columns) in shape.matrices()) == pytest.approx(
        1.24e9, rel=0.01
    )


def test_files_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(shapes.SHAPES, "small", SHAPE)
    written = shapes.cached_file("small", "Q4_0")
    assert written == tmp_path / "cache" / "models" / "small-Q4_0.gguf"
    before = written.stat().st_mtime_ns
    assert shapes.cached_file("small", "Q4_0").stat().st_mtime_ns == before
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.deep("lowbit")
@pytest.mark.parametrize("name", ["lowbit", *OTHERS])
def test_contenders_compute_the_same(name: str, path: Path) -> None:
    task = work(path)
    exact, other = loaded("lowbit float", task), loaded(name, task)
    tokens = np.array([7, 9])

    def compare(a: Any, b: Any) -> None:
        assert np.abs(a - b).max() < 0.05 * np.abs(a).max()

    compare(exact.prompt(), other.prompt())
    for _ in range(2):  # the same text again
        exact.rewind()
        other.rewind()
        for step in range(3):
            compare(exact.step(tokens + step), other.step(tokens + step))
    compare(exact.logits(), other.logits())
    assert other.perplexity() == pytest.approx(exact.perplexity(), rel=0.01)


def test_perplexity_is_that_of_the_model(path: Path) -> None:
    task = work(path, sequences=1)
    ours = LanguageModel.load(path).perplexity(task.prompts[0])
    assert loaded("lowbit", task).perplexity() == pytest.approx(ours)


@pytest.mark.parametrize("operation", [PROMPT, TEXT])
def test_seconds_and_figures(operation: str, path: Path) -> None:
    model = loaded("lowbit", work(path, operation))
    assert all(model.seconds() > 0 for _ in range(2))
    figures = model.figures()
    assert figures.keys() == ({"outside_kernels"} if operation == TEXT else set())
    assert all(0 < value < 1 for value in figures.values())


def test_four_bits_of_torchao(path: Path) -> None:
    exact, other = loaded("lowbit float", work(path)), loaded("torchao int4", work(path))
    a, b = exact.prompt(), other.prompt()
    assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(a) < 0.3
    assert 0 < other.nbytes < 2 * sum(n * k for _, (n, k) in SHAPE.matrices())


@pytest.mark.parametrize("operation", [PROMPT, TEXT])
def test_openvino_is_timed(operation: str) -> None:
    task = ModelWork(operation, str(smollm2()), [[1, 2, 3, 4], [5, 6, 7, 8]], 4, 1)
    model = loaded("OpenVINO GenAI", task)
    assert model.seconds() > 0
    assert model.perplexity() is None


def test_transformers_take_no_other_architecture(tmp_path: Path) -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    writer = gguf.GGUFWriter(tmp_path / "qwen.gguf", "qwen2")
    for key, value in {"block_count": 1, "embedding_length": 8, "attention.head_count": 2,
                       "context_length": 16, "vocab_size": 9}.items():  # fmt: skip
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(NotImplementedError, match="holds no Llama"):
        loaded("transformers f32", work(tmp_path / "qwen.gguf"))


def test_memory_of_a_process() -> None:
    assert memory("VmHWM") >= memory("VmRSS") >= 0


def test_a_warm_call_is_made_only_to_be_timed() -> None:
    asked: list[int] = []

    def seconds() -> float:
        asked.append(1)
        return 0.5

    samples = interleave({"a": [RemoteCall(seconds, warm=True)]}, QUICK)["a"]
    assert len(asked) == len(samples.seconds)
    assert samples.calls == 1


class Near(RemoteHere):
    KNOWN = ("lowbit", "llama.cpp", "plain read")


@pytest.mark.deep
def test_a_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "Remote", Near)
    monkeypatch.setattr(contender, "share_processor", lambda: None)
    monkeypatch.setattr(contender, "memory", lambda name: 1_000_000 if name == "VmHWM" else 0)
    monkeypatch.setattr(lm, "_PERPLEXITY_TOKENS", 20)
    suite = lm.LanguageModels(str(path), prompt=6, text=3, batch="1,2")
    record = run(suite, Plan(limits=QUICK))
    names = {"lowbit", "plain read"} | (
        {"llama.cpp"} if not find("lm", "llama.cpp").available(None) else set()
    )
    assert {row.implementation for row in record.rows} == names
    assert {row.case for row in record.rows} == {
        "prompt of 6, batch 1", "text of 3, batch 1", "prompt of 6, batch 2", "text of 3, batch 2",
    }  # fmt: skip
    absent = {one.implementation: one.reason for one in record.absent}
    assert absent["lowbit float"] == "crashed with SIGSEGV"
    ours = [row for row in record.rows if row.implementation == "lowbit"]
    assert all(row.extra[PERPLEXITY] > 1 and row.extra["peak_bytes"] == 1e6 for row in ours)
    assert {row.note for row in ours} == {"activations: grouped; cache: bfloat16"}
    assert all(one.pool == one.name for one in suite.implementations())
    text = next(row for row in ours if TEXT in row.sizes)
    assert text.limit_share is not None
    assert (
        text.weight_bytes
        == record.context["step_bytes"]
        == sum(rows * columns // 32 * 20 for _, (rows, columns) in SHAPE.matrices())
    )
    assert Record.from_json(record.to_json()) == record
    from rich.console import Console

    file = io.StringIO()
    Console(width=200, file=file).print(suite.render(record))
    shown = file.getvalue()
    assert "outside kernels" in shown
    assert "small.gguf" in shown


def test_a_library_without_metadata_is_of_an_unknown_version() -> None:
    loose: Any = SimpleNamespace(package=("Loose", "no-such-package"))
    assert Implementation.library(loose) == ("Loose", "unknown")


@pytest.mark.deep
def test_workers_answer(path: Path) -> None:
    suite = lm.LanguageModels(str(path), prompt=6, text=3, batch="1", contenders="lowbit,plain")
    record = run(suite, Plan(limits=QUICK))
    assert {row.implementation for row in record.rows} == {"lowbit", "lowbit float", "plain read"}
    assert not record.absent


def test_prompts_are_pieces_of_the_manual() -> None:
    suite = lm.LanguageModels(str(smollm2()), prompt=16)
    model = suite.make(replace(suite.cases()[0], sizes={PROMPT: 16, "batch": 2}), 0)
    assert model.perplexity_tokens[:32] == [*model.prompts[0], *model.prompts[1]]
    assert len(model.perplexity_tokens) == 1024


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": "llama-2b"}, "shape must be one of smollm2-135m, llama-1b, got 'llama-2b'"),
        ({"blocks": "Q3_K"}, "blocks must be one of Q4_0"),
        ({"batch": "0"}, "a batch is 0"),
        ({"batch": "x"}, "batch 'x' is not understood"),
        ({"prompt": 0}, "prompt is 0"),
        ({"contenders": "vllm"}, "no contender is called 'vllm'"),
        ({"model": __file__, "shape": "llama-1b"}, "a model and a shape"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.LanguageModels(**given)
    with pytest.raises(FileNotFoundError):
        lm.LanguageModels("no such file")
