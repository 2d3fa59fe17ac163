"""A fork while other threads are at everything that the library does."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

Words = Callable[..., list[str]]

# Each thing is done for the first time in a child, in a thread, or in both: programs are compiled,
# plans are made, properties computed, vectors added. A child ends by a signal if it hangs. The
# threads rest while a child is at work: what counts is where they are when it is made.
WORK = """
import itertools, os, signal, sys, threading, time, warnings
import numpy as np
import lowbit
from lowbit.graph import Graph, Node, Session, Tensor

warnings.simplefilter("ignore", DeprecationWarning)  # on forks of processes with threads
rng = np.random.default_rng(0)
floats = rng.standard_normal((40, 64)).astype(np.float32)
weight = rng.standard_normal((64, 48)).astype(np.float32)
shared = lowbit.pack(lowbit.quantize(weight, "int8", axis=1))
index = lowbit.VectorIndex(64)
index.add(floats)
graph = Graph(
    inputs=("x",), outputs=("y", "z"), constants={"w": weight},
    nodes=(
        Node("MatMul", ("x", "w"), ("h",)), Node("Relu", ("h",), ("y",)),
        Node("Attention", ("h", "h", "h"), ("z",), {"is_causal": True}),
    ),
    tensors={"x": Tensor("float32", ("rows", 64)), "w": Tensor("float32", (64, 48))},
)
session = Session(graph)
numbers = itertools.count(1)

def product(n):
    packed = lowbit.pack(lowbit.quantize(weight[:, : 1 + n % 40], "int8", axis=1))
    lowbit.linear_dynamic(floats, packed)
    lowbit.linear_dynamic(floats[: 1 + n % 40], shared, post_ops=(lowbit.Clamp(-n, n),))

def compiled(n):
    steps = ("relu", "silu", "gelu", "tanh", "sigmoid", "hardswish")
    order = [steps[n % 6], steps[n // 6 % 6], steps[n // 36 % 6]]
    lowbit.linear_dynamic(floats, shared, post_ops=order)

def planned(n):
    session(floats[: 1 + n % 40])
    Session(graph)(floats[: 1 + n % 40])

def searched(n):
    index.search(floats[: 1 + n % 9], 1 + n % 7)
    other = lowbit.VectorIndex(64, bits=(8, 4)[n % 2], metric=("dot", "l2", "cosine")[n % 3])
    other.add(floats)
    other.search(floats[:3], 2)

def added(n):
    index.add(floats[:2], ids=[1000 + 2 * n, 1001 + 2 * n])

def removed(n):
    index.remove([1000 + 2 * n])

def gemms(n):
    lowbit.gemm(floats[: 1 + n % 40], weight, threads=1 + n % 3)

work = product, compiled, planned, searched, added, gemms
stop, busy = threading.Event(), threading.Event()

def repeat(one):
    while not stop.is_set():
        busy.wait()
        one(next(numbers))

"""

CODE = (
    WORK
    + """
threads = [threading.Thread(target=repeat, args=(one,)) for one in work]
for thread in threads:
    thread.start()
for _ in range(int(sys.argv[1])):
    busy.set()
    time.sleep(0.2)
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            for one in work:
                one(next(numbers) + 10_000)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    busy.clear()
    print(os.waitpid(child, 0)[1])
stop.set()
busy.set()
for thread in threads:
    thread.join()
"""
)

# NumPy imports parts of itself when they are first used: `np.unique` does.
IMPORTS = (
    WORK
    + """
from lowbit.jit.compile import LOCK
from lowbit.registry.locks import importing

class Finder:
    def find_spec(self, name, path, target=None):
        if threading.get_ident() not in +importing._begun and not LOCK._is_owned():
            print(name)

sys.meta_path.insert(0, Finder())
for _ in range(3):
    for one in (*work, removed):
        one(next(numbers))
        one(next(numbers) + 10_000)
"""
)


@pytest.mark.deep
def test_a_child_can_do_everything_whatever_other_threads_did(words: Words) -> None:
    assert words(CODE, "4") == ["0"] * 4


@pytest.mark.deep
def test_a_fork_waits_for_whatever_a_call_imports(words: Words) -> None:
    assert words(IMPORTS) == []
