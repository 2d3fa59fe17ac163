"""Whether a lowered network computes what its operators mean, for the tests of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from nets import Net, random_inputs, with_formats

from lowbit.graph import Session
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph
from lowbit.isa import available

SETS = [available()[0], *(name for name in ("avx2", "generic") if name in available()[1:])]
F = np.float32

Make = Callable[[Net, str], str]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def same(
    graph: Graph, inputs: dict[str, np.ndarray], limit: float = 2e-6, sets: Sequence[str] = SETS
) -> None:
    """Equal to the definition, to so much of its greatest number."""
    want = evaluate(graph, inputs)
    for name in sets:
        got = Session(graph, threads=2, isa=name).run(**inputs)
        for output, value in want.items():
            assert got[output].shape == value.shape
            assert got[output].dtype == value.dtype
            if value.dtype.kind in "biu":
                np.testing.assert_array_equal(got[output], value)
                continue
            finite = np.isfinite(value)
            np.testing.assert_array_equal(got[output][~finite], value[~finite])
            spread = float(np.abs(value[finite]).max(initial=1e-3))
            error = np.abs(got[output][finite] - value[finite]).max(initial=0)
            assert error <= limit * spread, name


def formatted(net: Net, out: str, quanta: float, limit: float = 1e-4) -> None:
    """Also with inputs, the output, or both in 8 bits: each on another instruction set, which are
    others for other networks, since what reads and writes 8 bits is the same for all of them."""
    graph = net.graph(out)
    inputs = random_inputs(graph)
    turn = crc32(repr(graph.nodes).encode())
    floats = tuple(one for one in net.inputs if net.tensors[one].dtype == "float32")
    kept = net("Identity", out)
    first = SETS[turn % len(SETS)]
    same(with_formats(graph, *floats, dtype="int8"), inputs, limit, [first])
    for some, dtype in (((out,), "int8"), ((*floats, out), "uint8")):
        whole = with_formats(net.graph(kept), *some, dtype=dtype)
        want, scale = evaluate(whole, inputs)[kept], whole.tensors[out].scale
        assert scale is not None
        turn += 1
        got = Session(whole, threads=1, isa=SETS[turn % len(SETS)]).run(**inputs)[kept]
        assert np.abs(got - want).max(initial=0) <= quanta * scale * 1.001


def op(name: str, *constants: Any, **attributes: Any) -> Make:
    def make(net: Net, x: str) -> str:
        return net(name, x, *(net.constant(np.asarray(one)) for one in constants), **attributes)

    return make
