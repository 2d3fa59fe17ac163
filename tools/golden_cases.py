"""What golden.py asks for: calls, networks and suites, with data of fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from nets import NETS, QUANTIZED, random_inputs, with_formats
from tests.graph.operators.cases import CASES
from tests.graph.operators.test_operators import model_of

import lowbit
from lowbit.graph.graph import Graph
from lowbit.graph.onnx import imported
from lowbit.numerics import QTensor, int_format
from lowbit_lab.bench.core.suite import Suite, suites

Call = Callable[..., Any]
Requested = tuple[str, Call]
SHAPES = ((1, 1, 1), (1, 64, 64), (3, 65, 17), (16, 16, 16), (33, 700, 48), (64, 64, 64),
          (197, 768, 768), (1, 4096, 1024), (3000, 64, 64), (7, 20000, 5))  # fmt: skip
POST_OPS: tuple[tuple[Any, ...], ...] = (
    (), ("relu",), ("bias", "relu"), ("bias", "residual"), ("bias", "gelu"), ("silu",),
    ("bias", lowbit.Clamp(0, 6)), (lowbit.LeakyRelu(0.1),), ("tanh",), ("bias", "sigmoid"),
    ("bias", "hardswish"), ("bias", "gelu_tanh"),
    ("bias", lowbit.QuantizedResidual(0.1, 3), "relu"),
)  # fmt: skip
# Batch, size, channels, outputs, kernel, stride, groups.
CONVOLUTIONS = (
    (1, 56, 64, 64, 3, 1, 1), (1, 28, 128, 128, 3, 1, 1), (2, 7, 512, 512, 3, 1, 1),
    (1, 112, 3, 64, 7, 2, 1), (1, 28, 64, 128, 1, 2, 1), (1, 14, 256, 64, 1, 1, 1),
    (2, 14, 96, 96, 3, 1, 96), (1, 28, 144, 144, 5, 2, 144), (1, 9, 32, 64, 3, 1, 4),
    (1, 12, 5, 7, 2, 1, 1),
)  # fmt: skip


def drawn(shape: tuple[int, ...], low: int, high: int, dtype: str) -> np.ndarray:
    """Integers of a fixed seed, which repeat where they are many."""
    few = np.random.default_rng(0).integers(low, high, 65521).astype(dtype)
    return np.resize(few, shape)


@cache
def weight(k: int, n: int, most: int = 128) -> Any:
    """Packed bytes with a scale a column."""
    values = drawn((k, n), -most, most, "int8")
    scale = np.full(n, 0.01, np.float32)
    return lowbit.pack(QTensor(values, scale, np.zeros(n, np.int32), int_format("int8"), axis=1))


def quantized(m: int, k: int, n: int, out: Any = "float32", most: int = 128, ops: Any = None,
              dtype: str = "uint8", **how: Any) -> None:  # fmt: skip
    """`matmul_scaled`."""
    given: dict[str, Any] = {}
    if ops is not None:
        given = {"post_ops": ops}
        given |= {"bias": np.zeros(n, np.float32)} if "bias" in ops else {}
        bytes_ = any(isinstance(one, lowbit.QuantizedResidual) for one in ops)
        if bytes_ or "residual" in ops:
            given["residual"] = np.zeros((m, n), np.uint8 if bytes_ else np.float32)
    if out.endswith("int8"):
        given |= {"out_scale": 0.5, "out_zero_point": 3}
    lowbit.matmul_scaled(np.zeros((m, k), dtype), weight(k, n, most), a_scale=0.02, a_zero_point=7,
                         out_dtype=out, **given, **how)  # fmt: skip


def sums(m: int, k: int, n: int, dtype: str = "uint8", most: int = 128, **how: Any) -> None:
    lowbit.matmul(np.zeros((m, k), dtype), weight(k, n, most), **how)


def dynamic(m: int, k: int, n: int, symmetric: bool = False, **how: Any) -> None:
    lowbit.linear_dynamic(np.ones((m, k), np.float32), weight(k, n), symmetric=symmetric, **how)


@cache
def scaled_weight(k: int, n: int, group: int | None, symmetric: bool, of: Any = "int4") -> Any:
    values = np.random.default_rng(1).standard_normal((k, n), np.float32)
    how: dict[str, Any] = (
        {"axis": 1} if group is None else {"axis": 1, "group_size": group, "group_axis": 0}
    )
    return lowbit.pack(lowbit.quantize(values, of, symmetric=symmetric, **how))


def grouped(function: Call, m: int, k: int, n: int, group: int | None, symmetric: bool,
            dtype: Any = np.float32, of: str = "int4", **how: Any) -> None:  # fmt: skip
    function(np.ones((m, k), dtype), scaled_weight(k, n, group, symmetric, of), **how)


def floats(m: int, k: int, n: int, dtypes: str = "f32:f32:f32", lies: str = "C",
           beta: float = 0.0, **how: Any) -> None:  # fmt: skip
    """`gemm`."""
    names = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
    left, _, out = (names[one] for one in dtypes.split(":"))
    given: dict[str, Any] = {"c": np.zeros((m, n), np.float32), "beta": beta} if beta else {}
    b = np.zeros((n, k), left).T if lies == "F" else np.zeros((k, n), left)
    lowbit.gemm(np.zeros((m, k), left), b, out_dtype=out, **given, **how)


@cache
def kernels(channels: int, outputs: int, kernel: int, groups: int, most: int) -> Any:
    values = drawn((outputs, channels // groups, kernel, kernel), -most, most, "int8")
    scale, zero = np.full(outputs, 0.01, np.float32), np.zeros(outputs, np.int32)
    made = QTensor(values, scale, zero, int_format("int8"), axis=0)
    return lowbit.pack_convolution(made, groups=groups)


def images(batch: int, size: int, channels: int, outputs: int, kernel: int, stride: int,
           groups: int, out: str = "", most: int = 128, dtype: str = "uint8",
           **how: Any) -> None:  # fmt: skip
    """`convolution`."""
    given: dict[str, Any] = {}
    if out:
        given = {"scale": 0.02, "bias": np.zeros(outputs, np.float32), "out_dtype": out,
                 "post_ops": ("bias", "relu")}  # fmt: skip
        given |= {"out_scale": 0.5, "out_zero_point": 3} if out == "uint8" else {}
    x = np.zeros((batch, size, size, channels), dtype)
    lowbit.convolution(x, kernels(channels, outputs, kernel, groups, most), zero_point=7,
                       stride=stride, padding=kernel // 2, **given, **how)  # fmt: skip


SUITE_CALLS: dict[str, Call] = {
    "u8:s8:s32": sums, "u8:s8:f32": quantized, "u8:s8:u8": partial(quantized, out="uint8"),
    "f32:s8:f32": dynamic,
}  # fmt: skip


def requested() -> Iterator[Requested]:
    """Calls by name, each a function of isa and threads."""
    for title, suite in suites_with_options():
        if title.startswith(("matmul", "gemm")):
            for case in suite.cases(0):
                sizes = tuple(case.sizes[name] for name in "MKN")
                known = SUITE_CALLS.get(case.dtypes) or partial(floats, dtypes=case.dtypes)
                yield f"{title} {case}", partial(known, *sizes)
    for sizes in SHAPES:
        at = "x".join(map(str, sizes))
        for dtype in ("uint8", "int8"):
            for most in (64, 128):
                yield f"matmul {dtype} {most} {at}", partial(sums, *sizes, dtype, most)
        for symmetric in (False, True):
            yield f"dynamic {symmetric} {at}", partial(dynamic, *sizes, symmetric)
        for lies, beta in (("F", 0.0), ("C", 1.0), ("F", 1.0)):
            for dtypes in ("f32:f32:f32", "bf16:bf16:f32"):
                call = partial(floats, *sizes, dtypes, lies, beta)
                yield f"gemm {dtypes} {lies} {beta} {at}", call
    for ops in POST_OPS:
        for out in ("float32", "bfloat16", "uint8", "int8"):
            for m in (1, 50):
                shown = "+".join(map(str, ops)) or "none"
                yield f"scaled {m} {out} {shown}", partial(quantized, m, 96, 80, out, 128, ops)
    for function in (lowbit.linear_dynamic, lowbit.linear_weight_only):
        for group in (None, 32, 128):
            for symmetric in (True, False):
                for m in (1, 7, 200):
                    name = f"{function.__name__} int4 {group} {symmetric} {m}x512x320"
                    yield name, partial(grouped, function, m, 512, 320, group, symmetric)
        for symmetric, m in product((True, False), (1, 200)):
            name = f"{function.__name__} int8 32 {symmetric} {m}x512x320"
            yield name, partial(grouped, function, m, 512, 320, 32, symmetric, of="int8")
    for m in (1, 200):
        name = f"linear_weight_only bfloat16 {m}x512x320"
        call = partial(grouped, lowbit.linear_weight_only, m, 512, 320, 128, True,
                       ml_dtypes.bfloat16)  # fmt: skip
        yield name, call
    for one in CONVOLUTIONS:
        for out in ("", "float32", "uint8"):
            for most in (8, 128):
                yield f"convolution {one} {out} {most}", partial(images, *one, out, most)
        yield f"convolution {one} int8", partial(images, *one, "float32", 128, "int8")


Network = tuple[Graph, dict[str, np.ndarray]]


def graphs() -> Iterator[tuple[str, Callable[[], Network]]]:
    """Networks with their inputs, by name: those of the tests, every operator by itself, and those
    of the benchmark, of which some have fewer blocks."""
    for make in NETS:
        for batch in (1, 3):
            yield f"{make.__name__} {batch}", partial(_of_tests, make, batch, False)
            if make in QUANTIZED:
                yield f"{make.__name__} static {batch}", partial(_of_tests, make, batch, True)
    for number, case in enumerate(CASES):
        yield f"operator {number} {case}", partial(_of_operator, case)
    for name in BENCHED:
        for config in ("float", "static", "dynamic", "int4"):
            yield f"bench {name} {config}", partial(_of_bench, name, config)


def _of_tests(make: Callable[[], Graph], batch: int, static: bool) -> Network:
    graph = with_formats(make(), batch=batch) if static else make()
    return graph, random_inputs(graph, batch=batch)


def _of_operator(case: Any) -> Network:
    model, given = model_of(case)
    return imported(model), given


BENCHED = ("resnet34", "vit_b_16", "crepe", "efficientnet_lite0", "minilm")


@cache
def _captured(name: str) -> Network:
    """A float network with weights of a fixed seed."""
    import torch

    from lowbit.torch import compile

    network, inputs = _built(name)
    drawn = np.random.default_rng(0)
    with torch.no_grad():
        for one in network.parameters():
            if one.ndim > 1:
                normal = drawn.standard_normal(tuple(one.shape), np.float32)
                one.copy_(torch.from_numpy(normal / np.sqrt(normal[0].size)))
            elif one.abs().min() != 1:  # what no norm multiplies by
                one.zero_()
    graph: Graph = compile(network.eval(), tuple(map(torch.from_numpy, inputs))).graph
    return graph, dict(zip(graph.inputs, inputs, strict=True))


def _built(name: str) -> tuple[Any, tuple[np.ndarray, ...]]:
    from lowbit.models import networks

    image = np.random.default_rng(1).standard_normal((1, 3, 224, 224), np.float32)
    if name == "resnet34":
        return networks.ResNet(), (image,)
    if name == "vit_b_16":
        return networks.VisionTransformer(networks.Widths(768, 2, 12, 3072)), (image,)
    if name == "crepe":
        return networks.Crepe(), (image.reshape(-1)[:1024].reshape(1, 1024),)
    if name == "efficientnet_lite0":
        return networks.EfficientNetLite0(), (image,)
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=2, intermediate_size=1536)
    tokens = np.arange(1000, 1024)[None]
    return networks.SentenceEncoder(BertModel(config, False)), (tokens, np.ones_like(tokens))


def _of_bench(name: str, config: str) -> Network:
    from lowbit.models.quantize import Method, quantized_graph
    from lowbit.torch.capture.compute import COMPUTE

    graph, inputs = _captured(name)
    if config != "float":
        graph, _ = quantized_graph(graph, [inputs], Method(config=config), compute=COMPUTE)
    return graph, inputs


def suites_with_options() -> Iterator[tuple[str, Suite]]:
    """Every suite: what `lowbit bench NAME` runs, and the sets of shapes."""
    matmul: Any = suites.get("matmul")
    gemm: Any = suites.get("gemm")
    for name in ("all", "random"):
        yield f"matmul {name}", matmul(suite=name)
    dtypes = ("f32:f32:f32", "bf16:bf16:bf16", "bf16:bf16:f32", "f32:f32:bf16")
    yield "gemm", gemm(dtype=dtypes)
    for name in suites.names():
        if name not in ("matmul", "gemm"):
            yield name, suites.get(name)()
