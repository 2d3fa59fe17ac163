"""Attention and the batched product, compiled for GPUs that are not here, as they are started
there: with descriptors that the host made on Hopper, with pointers before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from lowbit.kernels.triton.ahead import Compiled, compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import attention, attention_backward, batched_matmul  # noqa: E402
from lowbit.kernels.triton.fast.attention import AttentionConfig  # noqa: E402
from lowbit.kernels.triton.fast.attention_backward import BackwardConfig  # noqa: E402
from lowbit.kernels.triton.fast.batched_matmul import MatmulConfig  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402

GPUS = [80, 90]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def operand(sm: int, type_: str, *block: int) -> Any:
    """The type of what `descriptors.described` makes of a tensor."""
    if sm < 90:
        return (f"*{type_}", *["i32"] * (len(block) - 1))
    return f"tensordesc<{type_}[{', '.join(map(str, block))}]>"


SIZES = ("i32:1", "i32:1", "i32:1", "i32", "i32", "i32")


def compiled(kernel: Any, given: dict[str, Any], sm: int, config: Any) -> Compiled:
    """With numbers divisible by 16 wherever nothing else is given."""
    arguments = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "sizes": SIZES} | given
    for name in ("batches", "section"):
        arguments[name] = "i32:1"
    wanted = {name: arguments[name] for name in kernel.arg_names}
    return compile_ahead(kernel, wanted, sm, **config.options)


def assert_matrix_units(made: Compiled, sm: int) -> None:
    """Copies of 16 bytes or by the copy engine, products by the matrix units, and no spills."""
    assert made.local == 0
    assert f".target sm_{sm}" in made.ptx
    if sm == 90:
        assert "wgmma.mma_async" in made.ptx
        assert "cp.async.bulk.tensor" in made.ptx
        assert "HMMA" not in made.sass
        assert "HGMMA" in made.sass
    else:
        assert "mma.sync" in made.ptx
        assert made.wide_loads > 0 or "cp.async.cg.shared.global" in made.ptx
        assert "HMMA" in made.sass


def forward_config(sm: int, size: int, causal: bool) -> AttentionConfig:
    return attention.attention_choice(Gpu(sm, 132), size, causal).config


def backward_config(sm: int, size: int) -> BackwardConfig:
    return attention_backward.backward_choice(Gpu(sm, 132), size).config


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("sm", GPUS)
def test_attention(sm: int, size: int, causal: bool, masked: bool) -> None:
    config = forward_config(sm, size, causal)
    q, k = (operand(sm, "bf16", 1, 1, rows, size) for rows in (config.queries, config.keys))
    given = {"q_rows": q, "k_rows": k, "v_rows": k, "z_rows": q, "lse_ptr": "*fp32"}
    given |= {"CAUSAL": causal, "SIZE": size, "QUERIES": config.queries, "KEYS": config.keys}
    given |= {"MASKED": masked, "WINDOW": 0, "CAP": 0.0}
    assert_matrix_units(compiled(attention.attention_kernel, given, sm, config), sm)
    if causal:
        given |= {"WINDOW": 1000, "CAP": 50.0}
        assert_matrix_units(compiled(attention.attention_kernel, given, sm, config), sm)


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("sm", GPUS)
def test_dk_dv(sm: int, size: int, causal: bool) -> None:
    config = backward_config(sm, size).keys
    q, k = (operand(sm, "bf16", 1, 1, rows, size) for rows in (config.queries, config.keys))
    sums = operand(sm, "fp32", 1, config.queries)
    given = {"lse_rows": sums, "delta_rows": sums}
    given |= dict.fromkeys(("q_rows", "dz_rows"), q)
    given |= dict.fromkeys(("k_rows", "v_rows", "dk_rows", "dv_rows"), k)
    given |= {"CAUSAL": causal, "SIZE": size, "QUERIES": config.queries, "KEYS": config.keys}
    kernel = attention_backward.attention_dk_dv_kernel
    assert_matrix_units(compiled(kernel, given, sm, config), sm)


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("sm", GPUS)
def test_dq(sm: int, size: int, causal: bool, masked: bool) -> None:
    config = backward_config(sm, size).queries
    q, k = (operand(sm, "bf16", 1, 1, rows, size) for rows in (config.queries, config.keys))
    given: dict[str, Any] = dict.fromkeys(("q_rows", "dz_rows", "dq_rows"), q)
    given |= {"k_rows": k, "v_rows": k, "lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    given |= {"CAUSAL": causal, "SIZE": size, "QUERIES": config.queries, "KEYS": config.keys}
    given["MASKED"] = masked
    made = compiled(attention_backward.attention_dq_kernel, given, sm, config)
    assert_matrix_units(made, sm)


@pytest.mark.parametrize("sm", GPUS)
def test_delta(sm: int) -> None:
    kernel = attention_backward.attention_delta_kernel
    given: dict[str, Any] = {"z_ptr": "*bf16", "dz_ptr": "*bf16", "delta_ptr": "*fp32"}
    given |= dict.fromkeys(("z_strides", "dz_strides"), ("i32", "i32", "i32", 1))
    arguments = dict.fromkeys(kernel.arg_names, "i32") | given | {"SIZE": 128, "QUERIES": 64}
    made = compile_ahead(kernel, arguments, sm, num_warps=4)
    assert made.local == 0
    assert made.wide_loads > 0


def product(sm: int, type_: str, turned: bool, config: MatmulConfig) -> Compiled:
    x, y = (config.rows, config.depth), (config.depth, config.columns)
    if turned:
        x, y = x[::-1], y[::-1]
    given = {"x": operand(sm, type_, 1, *x), "y": operand(sm, type_, 1, *y)}
    given["z"] = operand(sm, type_, 1, config.rows, config.columns)
    given |= {"X_TURNED": turned, "Y_TURNED": turned, "ROWS": config.rows, "FLAT": config.flat}
    given |= {"COLUMNS": config.columns, "DEPTH": config.depth, "PRECISION": "ieee"}
    return compiled(batched_matmul.batched_matmul_kernel, given, sm, config)


@pytest.mark.deep
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sm", GPUS)
def test_batched_matmul(sm: int, turned: bool) -> None:
    table = batched_matmul.TABLE[90] if sm == 90 else batched_matmul._FALLBACK
    assert_matrix_units(product(sm, "bf16", turned, table[2]), sm)


@pytest.mark.deep("80")
@pytest.mark.parametrize("sm", GPUS)
def test_float32_is_multiplied_as_it_is(sm: int) -> None:
    table = batched_matmul.TABLE[90] if sm == 90 else batched_matmul._FALLBACK
    made = product(sm, "fp32", False, table[4])
    assert made.local == 0
    assert "mma" not in made.ptx
    assert made.wide_loads > 0 or "cp.async.cg.shared.global" in made.ptx
