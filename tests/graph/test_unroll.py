"""Loops, branches and sequences whose counts are known are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowbit.graph import Session
from lowbit.graph.onnx import from_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
parser = pytest.importorskip("onnx.parser")

LOOP = """
    y, all = Loop (count, go, x) <body = turn (int64 i, bool more, float[2,4] h)
        => (bool again, float[2,4] next, float[2,4] seen) {
        again = Identity(more)
        step = Cast<to = 1>(i)
        next = Add(h, step)
        seen = Mul(next, x)
    }>
"""
NETWORKS = {
    "a loop": ("count = Constant<value = int64 {3}>() go = Constant<value = bool {1}>()" + LOOP,
               "float[2,4] y, float[3,2,4] all"),
    "a loop whose count is computed": ("""
        two = Constant<value = int64 {2}>() one = Constant<value = int64 {1}>()
        count = Add(two, one) go = Constant<value = bool {1}>()""" + LOOP,
        "float[2,4] y, float[3,2,4] all"),
    "a loop without turns": ("""
        count = Constant<value = int64 {0}>() go = Constant<value = bool {1}>()
        y = Loop (count, go, x) <body = turn (int64 i, bool more, float[2,4] h)
            => (bool again, float[2,4] next) { again = Identity(more) next = Neg(h) }>""",
        "float[2,4] y"),
    "a loop that ends itself": ("""
        go = Constant<value = bool {1}>() last = Constant<value = int64 {2}>()
        y = Loop (, go, x) <body = turn (int64 i, bool more, float[2,4] h)
            => (bool again, float[2,4] next) { again = Less(i, last) next = Add(h, x) }>""",
        "float[2,4] y"),
    "a branch": ("""
        c = Constant<value = bool {0}>()
        y = If (c) <then_branch = a () => (float[2,4] p) { p = Relu(x) },
                    else_branch = b () => (float[2,4] q) { q = Neg(x) }>""", "float[2,4] y"),
    "a sequence": ("""
        zero = Constant<value = int64 {0}>() last = Constant<value = int64 {-1}>()
        a = Relu(x) b = Neg(x) s = SequenceConstruct(a, b) t = SequenceInsert(s, x, zero)
        u = SequenceErase(t, last) v = SequenceInsert(u, b) e = SequenceAt(v, last)
        n = SequenceLength(v) m = Cast<to = 1>(n) f = Add(e, m)
        j = ConcatFromSequence<axis = 1>(v) k = ConcatFromSequence<axis = 0, new_axis = 1>(v)""",
        "float[2,4] f, float[2,12] j, float[3,2,4] k"),
    "parts": ("""
        sizes = Constant<value = int64[2] {1, 3}>() three = Constant<value = int64 {3}>()
        one = Constant<value = int64 {1}>()
        s = SplitToSequence<axis = 1>(x, sizes) a = SequenceAt(s, one)
        t = SplitToSequence<axis = -1>(x, three) b = SequenceAt(t, one)
        u = SplitToSequence<axis = 1, keepdims = 0>(x) c = SequenceAt(u, three)""",
        "float[2,3] a, float[2,1] b, float[2] c"),
    "a sequence that a loop makes": ("""
        count = Constant<value = int64 {3}>() go = Constant<value = bool {1}>()
        none = SequenceEmpty()
        s = Loop (count, go, none) <body = turn (int64 i, bool more, seq(float[2,4]) h)
            => (bool again, seq(float[2,4]) next) {
            again = Identity(more) step = Cast<to = 1>(i)
            part = Mul(x, step) next = SequenceInsert(h, part)
        }>
        y = ConcatFromSequence<axis = 0>(s)""", "float[6,4] y"),
}  # fmt: skip


def model(body: str, outputs: str, inputs: str = "float[2,4] x") -> Any:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {body} }}'
    return parser.parse_model(text)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_known_is_written_out(name: str) -> None:
    network = model(*NETWORKS[name])
    x = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    expected = onnxruntime.InferenceSession(network.SerializeToString()).run(None, {"x": x})
    made = Session(from_onnx(network), threads=1).run(x)
    for array, one in zip(made.values(), expected, strict=True):
        np.testing.assert_allclose(array, one, rtol=1e-6, atol=1e-6)


def test_what_is_not_known_is_refused() -> None:
    body = "go = Constant<value = bool {1}>()" + LOOP
    outputs, inputs = "float[2,4] y, float[3,2,4] all", "float[2,4] x, int64 count"
    with pytest.raises(NotImplementedError, match="Loop decides on data"):
        from_onnx(model(body, outputs, inputs))
    body = """s = SequenceConstruct(x) y = SequenceAt(s, at)"""
    with pytest.raises(NotImplementedError, match=r"SequenceAt \(1\)"):
        from_onnx(model(body, "float[2,4] y", "float[2,4] x, int64 at"))
    body = """at = Constant<value = int64 {1}>() s = SequenceConstruct(x) y = SequenceAt(s, at)"""
    with pytest.raises(ValueError, match="no element 1 of 1"):
        from_onnx(model(body, "float[2,4] y"))
