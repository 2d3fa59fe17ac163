"""Weights of language models are in memory once, in the bits of their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit.lm import LanguageModel
from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.matrix_rows import UnderWay, below, floats_of, rows_of
from lowbit.numerics import quantize
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.tensor_file import StoredTensor, TensorFile, forget, read_tensors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
IDS = [1, 5, 3, 9, 7, 2, 0, 11, 4]
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
PRODUCTS = ("blk.0.attn_q+blk.0.attn_k+blk.0.attn_v", "blk.0.attn_output", "token_embd",
            "blk.1.ffn_down")  # fmt: skip


def weights_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The names of matrices in a folder of transformers', and their sizes [N, K]."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    keys = width * config["num_key_value_heads"] // config["num_attention_heads"]
    sizes = {"model.embed_tokens": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        sizes |= {f"{at}.self_attn.{part}_proj": (width, width) for part in "qo"}
        sizes |= {f"{at}.self_attn.{part}_proj": (keys, width) for part in "kv"}
        gated = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        if experts := config.get("num_local_experts"):
            moe = f"{at}.block_sparse_moe"
            sizes[f"{moe}.gate"] = experts, width
            for number, (part, name) in (
                (number, pair) for number in range(experts)
                for pair in zip(gated, ("w1", "w3", "w2"), strict=True)
            ):  # fmt: skip
                sizes[f"{moe}.experts.{number}.{name}"] = gated[part]
        else:
            sizes |= {f"{at}.mlp.{part}_proj": size for part, size in gated.items()}
    return sizes


def write_folder(path: Path, dtype: Any, of: Any = None, **changed: Any) -> Path:
    """A random model whose weights are numbers that `of` (else dtype) has, held as dtype."""
    config = {"model_type": "llama", **SIZES, **changed}
    rng = np.random.default_rng(3)
    pool = (rng.standard_normal(100_003) * 10.0 ** rng.uniform(-8, 0, 100_003)).astype(of or dtype)
    tensors: dict[str, StoredTensor] = {}
    for name, size in weights_of(config).items():
        numbers = np.resize(np.roll(pool, len(tensors)), size) * np.float32(0.3)
        numbers = numbers.astype(of or dtype)
        tensors[f"{name}.weight"] = StoredTensor.of(numbers.astype(dtype))
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        names = "input_layernorm", "post_attention_layernorm"
        norms += [f"model.layers.{layer}.{name}" for name in names]
    ones = np.ones(config["hidden_size"], dtype)
    tensors |= {f"{name}.weight": StoredTensor.of(ones) for name in norms}
    path.mkdir()
    TensorFile("pt", "model", "1").write(path / "model.safetensors", {}, tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


MIXTURE = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.mark.deep("dense-*")  # kernels of twice as many kinds
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("changed", [{}, MIXTURE], ids=["dense", "experts"])
def test_floats_of_16_bits_are_those_numbers(
    tmp_path: Path, dtype: np.dtype[Any], changed: dict[str, Any]
) -> None:
    """Logits are the same bits as of the same numbers in a file of float32."""
    short = write_folder(tmp_path / "short", dtype, **changed)
    wide = write_folder(tmp_path / "wide", np.float32, dtype, **changed)
    results = []
    for path in (short, wide):
        model = LanguageModel.load(path, sequences=2)
        with model.sequence() as sequence:
            sequence.feed(IDS[:4])
            results.append((model.logits(IDS), sequence.feed([5])))
    for got, expected in zip(*results, strict=True):
        assert np.isfinite(expected).all()
        assert got.tobytes() == expected.tobytes()


def test_sessions_share_weights_in_the_bits_of_the_file(tmp_path: Path) -> None:
    model = LanguageModel.load(write_folder(tmp_path / "model", BFLOAT16), sequences=1)
    model.logits(IDS)
    with model.sequence() as sequence:
        sequence.feed(IDS)
        sequence.feed([3])
    backend: Any = model._backend
    sessions = backend._chunk, backend._step, backend._head
    for name in PRODUCTS:
        held = [one.graph.constants[name] for one in sessions if name in one.graph.constants]
        assert len(held) == 2
        assert held[0] is held[1]
        assert held[0].dtype == BFLOAT16
        for session in sessions:
            for plan in session._plans.values():
                assert name not in session.graph.constants or any(
                    np.shares_memory(array, held[0]) for array in plan._constants.values()
                )
    for session in sessions:  # nothing is packed once more for plans
        assert session._plans
        for plan in session._plans.values():
            own = [a for a in plan._constants.values() if a.size >= SIZES["hidden_size"] ** 2]
            constants = session.graph.constants.values()
            assert all(any(np.shares_memory(a, c) for c in constants) for a in own)


def test_integers_and_floats_of_a_folder_of_ones_own(tmp_path: Path) -> None:
    """Of quantized layers and a head of floats, each is held as it is in the files."""
    from lowbit.lm.quantize import quantize as quantize_model
    from lowbit.weights.format import WeightFormat

    source = write_folder(tmp_path / "source", BFLOAT16)
    quantize_model(source, tmp_path / "w4", WeightFormat("int4", 32))
    model = LanguageModel.load(tmp_path / "w4", sequences=1)
    backend: Any = model._backend
    constants = backend._step.graph.constants
    assert isinstance(constants["blk.0.attn_output"], PackedMatrix)
    assert constants["token_embd"].dtype == BFLOAT16
    files = (tmp_path / "w4").glob("*.safetensors")
    in_files = sum(t.data.nbytes for f in files for t in read_tensors(f).values())
    weights = {id(one): one.nbytes for one in constants.values()}
    rotation = constants["rotation"].nbytes
    assert sum(weights.values()) - rotation < 1.1 * in_files


def test_factors_of_products_stand_beside_weights_of_16_bits(tmp_path: Path) -> None:
    factors = {"residual_multiplier": 0.22, "logits_scaling": 7.0, "embedding_multiplier": 3.0,
               "attention_multiplier": 0.25}  # fmt: skip
    changed = {"model_type": "granite", **factors}
    short = LanguageModel.load(write_folder(tmp_path / "short", BFLOAT16, **changed))
    wide = LanguageModel.load(write_folder(tmp_path / "wide", np.float32, BFLOAT16, **changed))
    backend: Any = short._backend
    assert backend._step.graph.constants["blk.0.attn_output"].dtype == BFLOAT16
    got, expected = short.logits(IDS), wide.logits(IDS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("experts", [1, 3])
def test_rows_of_joined_weights(experts: int) -> None:
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal((rows * experts, 8)).astype(np.float32) for rows in (5, 2, 9)]
    expected = np.concatenate([a.reshape(experts, -1, 8) for a in arrays], 1).reshape(-1, 8)
    joined = below([floats_of(array) for array in arrays], experts)
    assert joined is not None
    assert joined.shape == expected.shape
    for first, last in rng.integers(0, len(expected) + 1, (20, 2)):
        which = slice(min(first, last), max(first, last))
        if which.start < which.stop:
            np.testing.assert_array_equal(joined.read(which), expected[which])
    quantized = [QuantizedWeight(quantize(array, "int4", axis=0, group_size=4)) for array in arrays]
    of_integers = below([rows_of(weight) for weight in quantized], experts)
    assert of_integers is not None
    whole = np.concatenate([w.dequantize().reshape(experts, -1, 8) for w in quantized], 1).reshape(
        -1, 8
    )
    part = of_integers.read(slice(3, len(expected)))
    assert isinstance(part, QuantizedWeight)
    np.testing.assert_array_equal(part.dequantize(), whole[3:])
    assert below([floats_of(arrays[0]), rows_of(quantized[1])]) is None


def test_bytes_under_way_have_a_bound() -> None:
    """However many threads there are, and though some want more than there may be."""
    from concurrent.futures import ThreadPoolExecutor

    under_way, current, most = UnderWay(0), 0, 0
    total = under_way._most << 20

    def work(size: int) -> None:
        nonlocal current, most
        with under_way(size):
            current += min(size, total)
            most = max(most, current)
            current -= min(size, total)

    sizes = np.random.default_rng(5).integers(1, 2 * total, 200).tolist()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, sizes))
    assert most <= total


def resident(array: np.ndarray) -> int:
    """Bytes of an array's memory that are mapped now."""
    first = array.ctypes.data // 4096
    count = -(-(array.ctypes.data + array.nbytes) // 4096) - first
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * count), np.uint64)
    return int((pages >> np.uint64(63)).sum()) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages there are")
def test_pages_of_a_file_are_given_back(tmp_path: Path) -> None:
    array = np.arange(1 << 20, dtype=np.uint32)
    TensorFile("pt", "x", "1").write(tmp_path / "a", {}, {"a": StoredTensor.of(array)})
    mapped = read_tensors(tmp_path / "a")["a"].numpy()
    assert mapped.sum() == array.sum()
    assert resident(mapped) == pytest.approx(mapped.nbytes, abs=1 << 16)
    forget(mapped[1000:])
    assert resident(mapped) == 0
    np.testing.assert_array_equal(mapped, array)
    forget(array)  # of no file
    np.testing.assert_array_equal(mapped, array)


CHILD = """
import sys
def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024
from lowbit.lm import LanguageModel
begin = status("VmRSS")
model = LanguageModel.load(sys.argv[1], sequences=1, context=256)
loaded = status("VmHWM")
model.logits([1, 2, 3])
with model.sequence() as sequence:
    sequence.feed([1, 2, 3])
    sequence.feed([4])
print(begin, loaded, status("VmHWM"), model._backend._cache.nbytes)
"""
LARGE = {"vocab_size": 24_000, "hidden_size": 512, "intermediate_size": 2048,
         "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
         "max_position_embeddings": 512}  # fmt: skip


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("kind", ["bfloat16", "w4", "Q4_0"])
def test_peaks_follow_from_the_file_with_any_number_of_threads(tmp_path: Path, kind: str) -> None:
    """Without what Python and libraries take, at most 1.3 times the file and the cache."""
    path = write_folder(tmp_path / "source", BFLOAT16, **LARGE)
    if kind == "w4":
        from lowbit.lm.quantize import quantize as quantize_model
        from lowbit.weights.format import WeightFormat

        quantize_model(path, tmp_path / "w4", WeightFormat("int4", 32))
        path = tmp_path / "w4"
    elif kind == "Q4_0":
        path = write_gguf(tmp_path / "model.gguf")
    size = open_checkpoint(path).nbytes
    peaks_of(path, 1)  # compiles
    for threads in (1, 16):
        load, run = peaks_of(path, threads)
        assert load < 1.3 * size, (threads, load, size)
        # The first calls' plans and results take some memory, whatever the file.
        assert run < 1.3 * size + (32 << 20), (threads, run, size)


def peaks_of(path: Path, threads: int) -> tuple[int, int]:
    """The most bytes that are resident after a model is loaded, and after a first step, without
    those before and the cache."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", CHILD, str(path)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    begin, loaded, run, cache = map(int, child.stdout.split())
    return loaded - begin - cache, run - begin - cache


def write_gguf(path: Path) -> Path:
    """A Llama whose blocks of Q4_0 are random bytes with scales."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("lowbit_lab")
    from lowbit_lab.bench.lm import shapes

    shape = shapes.Shape(12, 1024, 16, 4, 4096, 48_000)
    kind = gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "llama")
    shapes._describe(writer, shape)
    for name in shape.norms():
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))
    blocks = np.random.default_rng(6).integers(0, 256, (4096, 18), np.uint8)
    blocks[:, :2] = np.full((4096, 1), 0.01, np.float16).view(np.uint8)
    for name, (rows, depth) in shape.matrices():
        data = np.resize(blocks, (rows, depth // 32 * 18))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
