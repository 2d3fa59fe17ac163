"""What LOWBIT_VERBOSE and the logger "lowbit" tell."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

import lowbit
from lowbit import api
from lowbit.product.prepare import prepare

CALLS = """
import numpy as np
import lowbit
from lowbit.graph import Session
from lowbit.graph.graph import Graph, Node, Tensor

rng = np.random.default_rng(0)
a = rng.integers(0, 256, (3, 70), dtype=np.uint8)
b = lowbit.pack(rng.integers(-128, 128, (70, 20), dtype=np.int8))
print(*[int(lowbit.matmul(a, b).sum()) for _ in range(5)])
w = rng.standard_normal((70, 20), dtype=np.float32)
x = rng.standard_normal((3, 70), dtype=np.float32)
q = lowbit.quantize(w, "int4", axis=1, group_size=32, group_axis=0)
lowbit.linear_weight_only(x, lowbit.pack(q), np.ones(20, np.float32), post_ops=("bias", "relu"))
for _ in range(4):
    lowbit.gemm(x, w)
kernel = rng.integers(-128, 128, (8, 1, 3, 3), dtype=np.int8)
image = rng.integers(0, 256, (1, 5, 5, 8), dtype=np.uint8)
lowbit.convolution(image, lowbit.pack_convolution(kernel, groups=8), padding=1)
index = lowbit.VectorIndex(70)
index.add(x)
index.search(x, 1)
graph = Graph(("x",), ("y",), (Node("Relu", ("x",), ("y",), {}, "r"),), {},
              {"x": Tensor("float32", (3, 70))}, "tiny")
Session(graph, threads=1)(x)
"""


ON_GPU = """
import torch
import lowbit_lab
from lowbit.torch.functional import bmm, softmax

x = torch.ones(2, 16, 32)
with lowbit_lab.interpreter():
    inside = bmm(x, x.mT), softmax(x[0].bfloat16())
assert inside[0].equal(bmm(x, x.mT))  # which PyTorch computes: no line
"""


def _run(level: str, script: str = CALLS) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LOWBIT_VERBOSE": level}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.deep
def test_every_call_is_a_line() -> None:
    done = _run("2")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1  # nothing but what the script prints, five times
    lines = [line.split(",") for line in done.stderr.splitlines()]
    assert {line[0] for line in lines} == {"lowbit"}
    header = next(line for line in lines if line[1] == "info")
    assert header[2:] == ["operation", "dtypes", "shape", "kernel", "instruction set", "threads",
                          "post-operations", "microseconds"]  # fmt: skip
    told = [line[2:] for line in lines if line[1] in ("exec", "step")]
    assert all(len(line) == 8 and float(line[-1]) >= 0 for line in told)
    # Calls that would have been recognized, and have entered machine code at once, too.
    assert [line[:3] for line in told if line[0] == "matmul"] == [
        ["matmul", "u8:s8:s32", "3x70:70x20"]
    ] * 5
    assert [line[1] for line in told if line[0] == "gemm"] == ["f32:f32:f32"] * 4
    (weight_only,) = (line for line in told if line[0] == "linear_weight_only")
    assert weight_only[1:3] == ["f32:s4g32:f32", "3x70:70x20"]
    assert weight_only[6] == "bias+relu"
    named = {line[0]: line for line in told}
    assert named["convolution"][1:4] == ["u8:s8:s32", "1x5x5x8:3x3x8", "depthwise"]
    assert named["search"][2] == "3x70:70x3"
    assert named["network tiny"][2:4] == ["3x70:3x70", "1 steps"]
    assert named["r"][3] == "elementwise"
    assert float(named["r"][-1]) <= float(named["network tiny"][-1])
    plans = [line[2:9] for line in lines if line[1] == "plan"]
    assert all(line[:7] in plans for line in told if line[0] == "matmul")


@pytest.mark.deep
def test_operators_with_kernels_for_gpus_are_lines() -> None:
    pytest.importorskip("triton")
    done = _run("1", ON_GPU)
    assert done.returncode == 0, done.stderr
    told = [line.split(",")[2:] for line in done.stderr.splitlines() if ",exec," in line]
    assert [line[:7] for line in told] == [
        ["bmm", "f32:f32", "2x16x32:2x32x16", "batched_matmul", "the interpreter", "-", "-"],
        ["softmax", "bf16", "16x32", "softmax", "the interpreter", "-", "-"],
    ]
    assert all(float(line[7]) > 0 for line in told)


def test_another_level_is_refused() -> None:
    done = _run("loud")
    assert done.returncode
    assert "LOWBIT_VERBOSE=loud: expected 0, 1 (calls) or 2 (steps of networks)" in done.stderr


def test_plans_and_misses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    prepare.cache_clear()
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (5, 61), dtype=np.uint8)
    weight = lowbit.quantize(rng.standard_normal((61, 7), dtype=np.float32), "int8", axis=1)
    packed = lowbit.pack(weight)
    with caplog.at_level(logging.INFO, "lowbit"):
        for _ in range(4):
            lowbit.matmul_scaled(a, packed, a_scale=0.5, bias=np.ones(14, np.float32)[::2])
        lowbit.gemm(np.ones((5, 61), np.float32), np.ones((61, 7), np.float32), threads=1)
    messages = [record.getMessage() for record in caplog.records]
    assert any(one.startswith("plan,matmul_scaled,u8:s8:f32,5x61:61x7,") for one in messages)
    assert any(one.startswith("plan,gemm,f32:f32:f32,5x61:61x7,") for one in messages)
    assert next(one for one in messages if "prepared in Python" in one) == (
        "miss,matmul_scaled: calls are prepared in Python each time, since bias cannot be "
        "compared or taken as given"
    )
    assert not any(one.startswith("exec") for one in messages)  # those cost something
    assert not len(api._scaled.ways(packed))
    for _ in range(4):
        lowbit.matmul_scaled(a, packed, a_scale=0.5, post_ops=["relu"])
    assert len(api._scaled.ways(packed))


def test_what_keeps_a_call_from_being_known_is_named(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(0, 256, (4, 96), dtype=np.uint8)
    x = rng.standard_normal((4, 96), dtype=np.float32)
    w = rng.standard_normal((96, 7), dtype=np.float32)
    eight, four = lowbit.quantize(w, "int8", axis=1), lowbit.quantize(w, "int4", axis=1)
    residual = np.ones((7, 4), np.float32).T  # which is copied
    wide = np.ones((4, 14), np.int32)[:, ::2]
    bytes_, scaled, nibbles = (lowbit.pack(one) for one in (eight.values, eight, four))
    with caplog.at_level(logging.INFO, "lowbit"):
        for _ in range(3):
            lowbit.matmul(a, bytes_, out=wide)
            lowbit.linear_dynamic(x, scaled, residual=residual)
            lowbit.linear_weight_only(
                x, nibbles, residual=residual, bias=np.ones(14, np.float32)[::2]
            )
    told = [record.getMessage() for record in caplog.records]
    misses = {one.split(":")[0]: one for one in told if "prepared in Python" in one}
    assert "since out cannot" in misses["miss,matmul"]
    assert "since residual cannot" in misses["miss,linear_dynamic"]
    assert "since bias, residual cannot" in misses["miss,linear_weight_only"]
