"""What the functions hand to Triton, compiled for GPUs that are not here: tuples of strides and
sizes, ones among them, and descriptors, as Triton itself takes them at a launch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from lowbit.kernels.triton import fast  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402
from lowbit.torch.functional import pack_int4  # noqa: E402

MODULES = {
    one.name: importlib.import_module(f"{fast.__name__}.{one.name}")
    for one in pkgutil.iter_modules(fast.__path__)
}


@pytest.fixture(params=[80, 90])
def compiled(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> dict[str, Any]:
    """By kernel, the types of the parameters of what was started for a GPU, and only compiled."""
    sm, found = request.param, dict[str, Any]()
    stub = SimpleNamespace(
        get_current_device=lambda: sm,  # a number that no real one has: kernels are kept by it
        get_current_target=lambda: GPUTarget("cuda", sm, 32),
        get_current_stream=lambda device: 0,
    )

    def start(kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        made = kernel.run(grid=grid, warmup=True, **arguments, **options, enable_fp_fusion=True)
        assert made.metadata.target.arch == sm
        found[kernel.__name__] = made.src.signature

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", stub)
    for module in MODULES.values():
        if hasattr(module, "gpu_of"):
            monkeypatch.setattr(module, "gpu_of", lambda device: Gpu(sm, 132))
        if module is not MODULES["launch"] and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", start)
    return {"sm": sm, "found": found}


def _attention(batches: int, heads: int, queries: int, keys: int) -> None:
    q = torch.zeros(batches, heads, queries, 64, dtype=torch.bfloat16)
    k = torch.zeros(batches, 1, keys, 64, dtype=torch.bfloat16)
    z, lse = MODULES["attention"].attention(q, k, k, True, 0.1)
    MODULES["attention_backward"].attention_backward(q, k, k, z, lse, q, True, 0.1)


def _bmm(batches: int, rows: int, columns: int, terms: int) -> None:
    x, y = torch.zeros(batches, rows, terms).half(), torch.zeros(batches, terms, columns).half()
    MODULES["batched_matmul"].batched_matmul(x, y, False)


def _conv2d(batches: int, channels: int, size: int, out: int) -> None:
    x, weight = torch.zeros(batches, channels, size, size), torch.zeros(out, channels, 1, 1)
    pairs = (1, 1), (0, 0), (1, 1)
    MODULES["conv2d"].conv2d(x.half(), weight.half(), None, *pairs, False)


@pytest.mark.deep("*-_bmm-*", "*-_attention-*")
@pytest.mark.pairs
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 4, 100, 80)], ids=str)
@pytest.mark.parametrize("function", [_attention, _bmm, _conv2d])
def test_tuples_and_descriptors(
    function: Callable[..., None], sizes: tuple[int, ...], compiled: dict[str, Any]
) -> None:
    function(*sizes)
    for kernel, signature in compiled["found"].items():
        if kernel == "attention_delta_kernel":
            continue
        first = next(iter(signature.values()))
        if compiled["sm"] == 90:
            assert first.startswith("tensordesc<")
        else:
            assert first[0].startswith("*")
            assert set(first[1:]) <= {"i32", "constexpr"}
    assert compiled["found"]


@pytest.mark.deep
def test_rows_and_weights(compiled: dict[str, Any]) -> None:
    weight = pack_int4(torch.zeros(70, 256, dtype=torch.uint8), torch.ones(70, 2), group_size=128)
    for rows in (5, 200):
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        MODULES["weight_only"].weight_only_matmul(x, *vars(weight).values(), None, None, "")
    x = torch.zeros(2, 5000, dtype=torch.bfloat16)
    MODULES["softmax"].softmax(x)
    MODULES["softmax"].softmax_backward(x, x)
    MODULES["row_sum"].row_sum(x)
    _, mean, rstd = MODULES["norm"].norm(x, x[0], x[1], 1e-5, True)
    MODULES["norm"].norm_backward(x, x, x[0], mean, rstd, True)
    MODULES["norm"].norm_weight_backward(x, x, mean, rstd, x.dtype, True)
    weights = "few_rows many_rows" if compiled["sm"] == 90 else "few_rows dequantize"
    started = f"{weights} softmax softmax_backward row_sum norm norm_backward"
    expected = {f"{name}_kernel" for name in (*started.split(), "norm_weight", "column_sum")}
    assert set(compiled["found"]) == expected
