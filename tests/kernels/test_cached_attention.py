"""Attention over a cache: steps of several sequences and chunks of one, on every set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lowbit.graph import Session
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.operator import operators
from lowbit.isa import SETS, available
from lowbit.kernels.cpu.attention.cached import cached_attention, refusal, rotation_table
from lowbit.kernels.cpu.attention.chunks import CHUNK, CachedForm
from lowbit.kernels.cpu.attention.plan import attention_parameters

CAPACITY = 2 * CHUNK + 70
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
}
# Of a step: queries and weights by bytes have 16 bits.
ERRORS = {"float32": 1e-6, "bfloat16": 1e-6, "int8": 1e-4}
# Heads of queries, of keys, their elements, and how many of these turn.
LIMITS = ({"window": 70}, {"window": CHUNK + 9, "cap": 1.5}, {"window": 1}, {"cap": 0.5})
HEADS = ((9, 3, 64, 64), (4, 1, 40, 16), (2, 2, 128, 64), (16, 1, 8, 0), (6, 2, 80, 80),
         (7, 1, 96, 96), (2, 1, 256, 128))  # fmt: skip


def problem(heads, dtype, positions, slots, seed=0, **attributes):
    """The arrays of a call, by input, and the graph; a cache of values that are not small."""
    (queries, keys, size, rotated), rng = heads, np.random.default_rng(seed)
    rows, count = len(positions), 1 if slots is None else max(slots) + 1
    cache = stored(rng.standard_normal((count, 2, 2, keys, CAPACITY, size)), dtype)
    given = {
        "q": rng.standard_normal((rows, queries, size)).astype(np.float32),
        "k": rng.standard_normal((rows, keys, size)).astype(np.float32),
        "v": rng.standard_normal((rows, keys, size)).astype(np.float32),
        "positions": np.array(positions, np.int64),
        "cache": cache,
    }
    if slots is not None:
        given["slots"] = np.array(slots, np.int64)
    n = max(rotated // 2, 0)
    table = rotation_table(CAPACITY, 100.0 ** -(np.arange(n) / max(n, 1)))
    tensors = {name: Tensor(one.dtype.name, one.shape) for name, one in given.items()}
    names = ("q", "k", "v", "rotation", "positions", "cache", *(["slots"] if slots else []))
    node = Node("CachedAttention", names, ("out",), {"layer": 1, **attributes})
    return given, Graph(tuple(given), ("out",), (node,), {"rotation": table}, tensors)


def stored(rows, dtype):
    """Rows as a cache has them: of bytes, each with its scale behind it."""
    if dtype != "int8":
        return rows.astype(DTYPES[dtype])
    scale = (np.abs(rows).max(-1, keepdims=True) / 127).astype(np.float32)
    return np.concatenate([np.rint(rows / scale).astype(np.int8), scale.view(np.int8)], -1)


def numbers(cache):
    """What a cache stands for, and how far apart neighbours are at most."""
    if cache.dtype != np.int8:
        step = 2.0**-8 if cache.dtype != np.float32 else 2.0**-22
        values = cache.astype(np.float64)
        return values, step * (1 + np.abs(values))
    scale = np.ascontiguousarray(cache[..., -4:]).view(np.float32)
    return cache[..., :-4] * scale.astype(np.float64), 1.001 * scale


def expected(given, graph):
    """The output and the cache that the definition leaves."""
    cache, node = given["cache"].copy(), graph.nodes[0]
    arrays = {**given, "cache": cache, "rotation": graph.constants["rotation"]}
    out = operators.get(node.op).meaning(node, *(arrays[name] for name in node.inputs))
    return out, cache


def check(given, graph, out, cache, tolerance):
    want, want_cache = expected(given, graph)
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=0)
    # One rounding of what is turned.
    (made, _), (wanted, step) = numbers(cache), numbers(want_cache)
    assert (np.abs(made - wanted) <= step).all()


@pytest.mark.deep("*-generic", "(16, 1, 8, 0)-*", "(7, 1, 96, 96)-*", "(2, 1, 256, 128)-*")
@pytest.mark.pairs
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_steps_of_several_sequences(heads, dtype, isa):
    given, graph = problem(heads, dtype, [CHUNK, 0, 2 * CHUNK + 3, CHUNK - 1], [1, 3, 0, 2])
    outs = []
    for threads in (1, 3):
        cache = given["cache"].copy()
        out = Session(graph, threads=threads, isa=isa).run(**{**given, "cache": cache})["out"]
        check(given, graph, out, cache, ERRORS[dtype])
        outs.append(out)
    assert (outs[0] == outs[1]).all()


@pytest.mark.deep("0-5-(9, 3, 64, 64)-float32-avx512_vnni", "0-5-(9, 3, 64, 64)-float32-amx*")
@pytest.mark.pairs
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("first", "rows"), [(0, 5), (CHUNK - 2, 37)])
def test_chunks_of_a_prompt(heads, dtype, isa, first, rows):
    given, graph = problem(heads, dtype, range(first, first + rows), None)
    for threads in (1, 3):
        cache = given["cache"].copy()
        out = Session(graph, threads=threads, isa=isa).run(**{**given, "cache": cache})["out"]
        check(given, graph, out, cache, 1e-6 if dtype == "float32" else 2e-2)


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_windows_and_caps(limits, dtype, isa):
    heads = (6, 2, 40, 32)
    for positions, slots in (
        ([CHUNK + 8, 0, 2 * CHUNK + 3, 69], [1, 3, 0, 2]),
        (range(5), None), (range(CHUNK - 60, CHUNK + 150), None),
    ):  # fmt: skip
        given, graph = problem(heads, dtype, positions, slots, **limits)
        outs = []
        for threads in (1, 3):
            cache = given["cache"].copy()
            out = Session(graph, threads=threads, isa=isa).run(**{**given, "cache": cache})["out"]
            error = 2 * ERRORS[dtype]
            check(given, graph, out, cache, error if slots or dtype == "float32" else 2e-2)
            outs.append(out)
        assert (outs[0] == outs[1]).all() or slots is None


@pytest.mark.deep
def test_keys_before_a_window_are_not_read():
    """They may be anything, but for those that share a vector with the window's first."""
    for positions, slots in (([CHUNK + 200], [0]), (range(CHUNK, CHUNK + 40), None)):
        given, graph = problem((4, 2, 32, 32), "float32", positions, slots, window=100)
        given["cache"][..., : positions[0] - 99 - 192, :] = np.nan
        cache = given["cache"].copy()
        out = Session(graph, threads=1).run(**{**given, "cache": cache})["out"]
        np.testing.assert_allclose(out, expected(given, graph)[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("limits", [{}, {"window": 70, "cap": 1.5}], ids=str)
@pytest.mark.parametrize("isa", list(SETS))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_text_reads_and_writes_only_what_is_there(isa, dtype, limits):
    """By the interpreter, which checks each access."""
    heads = (4, 2, 24, 16)
    given, graph = problem(heads, dtype, [3, CHUNK + 1], [1, 0], **limits)
    out, cache = np.zeros((2, 4, 24), np.float32), given["cache"].copy()
    form = CachedForm("s8" if dtype == "int8" else "f32", 24, 16, 2, **limits)
    part = cache.reshape(-1)[2 * 2 * CAPACITY * form.row :]  # the second layer
    chunks = -(-CAPACITY // CHUNK)
    cached_attention.interpret(SETS[isa], {
        "out": out, "turned": np.zeros(2 * 4 * 24, np.float32), "q": given["q"],
        "key": given["k"], "value": given["v"], "rotation": graph.constants["rotation"],
        "positions": given["positions"], "slots": given["slots"], "cache": part.view(np.uint8),
        "parameters": attention_parameters(24**-0.5),
        "scratch": np.zeros(form.scores, np.float32),
        "parts": np.zeros(2 * 2 * chunks * 2 * form.part, np.float32), "q_stride": 4 * 24,
        "k_stride": 2 * 24, "v_stride": 2 * 24, "rows": 2, "heads": 2, "capacity": CAPACITY,
        "slot_stride": 2 * 2 * 2 * CAPACITY * form.row, "chunks": chunks,
    }, form=form)  # fmt: skip
    check(given, graph, out, cache, ERRORS[dtype])


def test_great_scores_and_equal_ones():
    """No score overflows, and all keys may weigh the same."""
    given, graph = problem((2, 1, 16, 16), "float32", [CHUNK + 40], [0])
    for factor in (0.0, 300.0):
        scaled = {**given, "q": given["q"] * np.float32(factor)}
        cache = given["cache"].copy()
        out = Session(graph, threads=1).run(**{**scaled, "cache": cache})["out"]
        check(scaled, graph, out, cache, 2e-5)


def test_rows_of_bytes_that_are_zero_tiny_or_no_numbers():
    """Zeros stay zeros; what is not finite makes the sums over its key so."""
    for number in (0.0, 1e-38, np.inf, np.nan):
        given, graph = problem((2, 2, 16, 16), "int8", [0], [0])
        given["v"] = np.array([[[number] * 16, [1.0] * 16]], np.float32)
        cache = given["cache"].copy()
        out = Session(graph, threads=1).run(**{**given, "cache": cache})["out"]
        np.testing.assert_allclose(out[0, 1], 1, rtol=1e-6)
        if np.isfinite(number):
            assert (np.abs(out[0, 0]) <= number).all()
        else:
            assert np.isnan(out[0, 0]).all()


def test_forms_that_are_not_served():
    assert "int8" in str(refusal(CachedForm("u8", 64, 64, 1)))
    assert "multiple" in str(refusal(CachedForm("f32", 60, 60, 1)))
    assert refusal(CachedForm("f32", 64, 32, 4)) is None
