"""What a decoder does between products: the kernels in the interpreter, every access checked,
against PyTorch in float64; and what their operators promise PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from lowbit.torch.functional import decoding  # noqa: E402
from lowbit_lab import interpreter  # noqa: E402

# A whole unit in the last place: Triton's interpreter cuts bfloat16 off.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
DTYPES = [torch.float32, torch.bfloat16]


def data(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(made: Any, want: Any) -> None:
    assert made.shape == want.shape
    assert made.dtype == want.dtype
    error = (made.double() - want.double()).abs()
    assert (error <= ROUNDING[made.dtype] * (want.double().abs() + 0.05)).all()


def rotated(dtype: Any, cache: Any, size: int, pairs: int, normed: bool, joint: bool) -> Any:
    """Arguments of `rotate`: 3 rows of 4 heads and 2 of keys."""
    whole = data(3, 8 * size, dtype=dtype)
    parts = whole.split([4 * size, 2 * size, 2 * size], 1)
    q, k, v = parts if joint else (part.clone() for part in parts)
    angles = data(9, 2, pairs, seed=1) if pairs else None
    norms = [data(size, dtype=dtype, seed=2), data(size, dtype=dtype, seed=3)]
    both = torch.zeros(2, 5, 2, 9, size, dtype=cache)
    places = torch.tensor([8, 0, 4]), torch.tensor([1, 4, 0])
    more = norms if normed else [None, None]
    return [q, k, v, angles, *places, both[0], both[1], *more, 1e-5], both


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("size", "pairs", "normed"), [
    (16, 8, False), (16, 8, True), (24, 8, True), (24, 4, False), (8, 0, True), (8, 0, False),
])  # fmt: skip
def test_rotate(dtype: Any, joint: bool, size: int, pairs: int, normed: bool) -> None:
    for cache in {dtype, torch.float32}:
        arguments, both = rotated(dtype, cache, size, pairs, normed, joint)
        want = decoding.rotate(*arguments)
        kept = both.clone()
        both.zero_()
        with interpreter():
            made = decoding.rotate(*arguments)
        near(made, want)
        near(both, kept)
        assert (kept != 0).any(-1).sum() == 2 * 3 * 2  # nothing else was written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_gated(dtype: Any, function: str) -> None:
    for x in (data(3, 50, dtype=dtype), data(1, 2100, dtype=dtype), data(2, 90, dtype=dtype)[:, 4:],
              30 * data(2, 40, dtype=dtype), data(0, 8, dtype=dtype)):  # fmt: skip
        with interpreter():
            made = decoding.gated(x, function)
        near(made, decoding.gated(x, function))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 40), (0, 16)])
def test_add_rms_norm(shape: tuple[int, int], dtype: Any) -> None:
    x, y = data(*shape, dtype=dtype), data(*shape, dtype=dtype, seed=1)
    weight = data(shape[1], 2, dtype=dtype, seed=2)[:, 0]
    with interpreter():
        made = decoding.add_rms_norm(x, y, weight, 1e-5)
    for one, other in zip(made, decoding.add_rms_norm(x, y, weight, 1e-5), strict=True):
        near(one, other)


def test_operators_keep_their_promises() -> None:
    ops = torch.ops.lowbit
    x, weight = data(3, 32), data(32)
    torch.library.opcheck(ops.gated.default, (x, "silu"))
    torch.library.opcheck(ops.add_rms_norm.default, (x, x, weight, 1e-5))
    torch.library.opcheck(
        ops.rotate.default, rotated(torch.float32, torch.float32, 16, 8, True, True)[0]
    )


@pytest.mark.deep("rotate_kernel-flags0-80")
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("name", "flags"), [
    ("rotate_kernel", (True, True)), ("rotate_kernel", (True, False)),
    ("rotate_kernel", (False, False)), ("gated_kernel", (False, False)),
    ("gated_kernel", (True, False)), ("add_norm_kernel", (False, False)),
])  # fmt: skip
def test_compiled_ahead(name: str, flags: tuple[bool, bool], sm: int) -> None:
    from lowbit.kernels.triton.ahead import compile_ahead
    from lowbit.kernels.triton.fast import decoding as kernels

    kernel = getattr(kernels, name)
    given: dict[str, Any] = {one: "*bf16" if "_ptr" in one else "i32" for one in kernel.arg_names}
    given |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "angles_ptr": "*fp32"}
    given |= {"epsilon": "fp32", "SIZE": 128, "HALF": 64, "TURNED": flags[0], "NORMED": flags[1]}
    given |= {
        "TANH": flags[0],
        "BLOCK": {"rotate_kernel": 128, "gated_kernel": 1024}.get(name, 4096),
    }
    warps = {"rotate_kernel": 1, "gated_kernel": 4}.get(name, 8)
    given = {one: given[one] for one in kernel.arg_names}
    made = compile_ahead(kernel, given, sm, num_warps=warps)
    assert made.local == 0
    assert made.count("LDL") == made.count("STL") == 0
    assert made.wide_loads > 0 or name == "rotate_kernel"
