"""4-bit products on the GPU: in the interpreter here, ahead of time for two GPUs, and on one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import lowbit.lab  # noqa: E402
from lowbit.gpu import Int4Weight, int4_matmul, pack_int4  # noqa: E402
from lowbit.kernels.triton.ahead import compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import int4_matmul as fast  # noqa: E402

GPU = torch.cuda.is_available()


def _drawn(
    m: int, n: int, k: int, group: int, dtype: Any, zeros: bool, seed: int = 0
) -> tuple[Any, Int4Weight, Any, Any]:
    """x, the packed weight, the weight in float64, and the budget [m, n] of a result."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (n, k), generator=made, dtype=torch.uint8)
    groups = -(-k // group)
    scale = (torch.rand(n, groups, generator=made) * 0.02 + 0.001).to(dtype)
    zero = torch.randint(0, 16, (n, groups), generator=made) if zeros else None
    x = (torch.randn(m, k, generator=made) * 3).to(dtype)
    at = torch.arange(k) // group
    centre = 8.0 if zero is None else zero.double()[:, at]
    w = (values.double() - centre) * scale.double()[:, at]
    packed = pack_int4(values, scale, zero, group_size=group)
    # Activations: 16 bits of the greatest of their 32. Sums: what float32 loses in K additions of
    # n·x, with the exponent's 1024 in the kernel of float16. Then one rounding to the dtype.
    greatest = x.double().abs().amax(1, keepdim=True) * 2.0**-15
    mass = (x.double().abs() + greatest) @ (scale.double()[:, at].T * (1040.0 + 8))
    exact = x.double() @ w.T
    unit = torch.finfo(dtype).eps
    budget = greatest * w.abs().sum(1) + 2.0**-22 * mass + unit * exact.abs() + 1e-6
    if m > 128 or (m > 1 and group % fast.TILE_DEPTH):  # the weight is rounded too
        budget = budget + unit * (x.double().abs() @ w.abs().T)
    return x, packed, w, budget


CASES = [(1, 64, 1024, 128), (1, 70, 128, 32), (1, 130, 520, 64), (3, 70, 256, 128),
         (17, 65, 392, 128), (33, 64, 640, 256), (70, 66, 136, 128), (6, 66, 136, 64),
         (2, 5, 8, 32)]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_in_the_interpreter(case: tuple[int, int, int, int], dtype: Any, zeros: bool) -> None:
    x, packed, w, budget = _drawn(*case, dtype, zeros)
    with lowbit.lab.interpreter():
        z = int4_matmul(x, packed)
    assert z.dtype == dtype
    assert ((z.double() - x.double() @ w.T).abs() <= budget).all()
    plain = int4_matmul(x, packed)
    assert ((plain.double() - x.double() @ w.T).abs() <= budget).all()


def test_words_are_packed_as_they_come() -> None:
    x, packed, _, _ = _drawn(3, 70, 256, 128, torch.bfloat16, True)
    words = packed.tiles.transpose(1, 2).reshape(128, 32)[:70]
    zero = None if packed.row_zero is None else packed.row_zero[:70] + 8
    again = pack_int4(words, packed.row_scale[:70], zero, group_size=128)
    torch.testing.assert_close(again.tiles, packed.tiles, rtol=0, atol=0)
    torch.testing.assert_close(int4_matmul(x, again), int4_matmul(x, packed), rtol=0, atol=0)


def test_shapes_and_the_operator() -> None:
    x, packed, _, _ = _drawn(12, 70, 256, 128, torch.bfloat16, False)
    z = int4_matmul(x, packed)
    assert torch.equal(int4_matmul(x.view(3, 4, 256), packed), z.view(3, 4, 70))
    assert int4_matmul(x[:0], packed).shape == (0, 70)
    assert torch.equal(int4_matmul(x.T.contiguous().T, packed), z)
    arguments = (x, *packed[:6], packed.group_size)
    torch.library.opcheck(torch.ops.lowbit.int4_matmul.default, arguments)


def test_the_gradient_of_activations() -> None:
    x, packed, w, _ = _drawn(5, 70, 256, 64, torch.bfloat16, True)
    x.requires_grad_()
    dz = torch.randn(5, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    (dx,) = torch.autograd.grad(int4_matmul(x, packed), x, dz)
    exact = dz.double() @ w
    assert ((dx.double() - exact).abs() <= 2.0**-6 * dz.double().abs() @ w.abs()).all()


def test_errors_say_what_to_do() -> None:
    values, scale = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    packed = pack_int4(values, scale, group_size=32)
    with pytest.raises(ValueError, match="last dimension must be 64"):
        int4_matmul(torch.ones(2, 63, dtype=torch.bfloat16), packed)
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        int4_matmul(torch.ones(2, 64), packed)
    with pytest.raises(TypeError, match="pack_int4"):
        int4_matmul(torch.ones(2, 64, dtype=torch.bfloat16), values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_int4(values, scale, group_size=24)
    with pytest.raises(ValueError, match=r"must be \[4, 2\]"):
        pack_int4(values, scale[:, :1], group_size=32)
    values[2, 5] = 16
    with pytest.raises(ValueError, match=r"weight\[2, 5\] is 16"):
        pack_int4(values, scale, group_size=32)
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_int4(values[:2, :60], scale[:2], group_size=32)


POINTERS = {"tiles_ptr": "*i32", "weight_scale_ptr": "*bf16", "zero_ptr": "*bf16",
            "partial_ptr": "*fp32", "met_ptr": "*i32", "z_ptr": "*bf16"}  # fmt: skip


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("half", [False, True])
def test_ahead_of_time_rows(sm: int, half: bool) -> None:
    kind = "*fp16" if half else "*bf16"
    made = compile_ahead(
        fast.rows_kernel,
        {**POINTERS, "tiles_ptr": "*i16", "z_ptr": kind, "planes_ptr": kind, "sums_ptr": "*fp32",
         "M": "i32:1", "N": "i32", "K": "i32", "GROUP": 128, "ZERO": False, "ASM": True,
         "HALF": half, "BLOCK_M": 16, "SPLITS": 4},
        sm, num_warps=4, num_stages=3,
    )  # fmt: skip
    assert made.local == 0
    assert made.count("HGMMA" if sm == 90 else "HMMA") >= 4
    assert "cp.async" in made.ptx or made.wide_loads
    # No conversion of single nibbles: bits only.
    assert made.count("I2F") + made.count("I2FP") == 0


@pytest.mark.parametrize("sm", [80, 90])
def test_ahead_of_time_what_is_made_of_x(sm: int) -> None:
    digits = compile_ahead(
        fast.digits_kernel,
        {"x_ptr": "*bf16", "even_ptr": "*i32", "odd_ptr": "*i32", "sum_ptr": "*fp32",
         "scale_ptr": "*fp32", "met_ptr": "*i32", "K": "i32", "met": "i32", "BLOCK": 32, "MET": 32},
        sm,
    )  # fmt: skip
    planes = compile_ahead(
        fast.planes_kernel,
        {"x_ptr": "*bf16", "planes_ptr": "*bf16", "sums_ptr": "*fp32", "met_ptr": "*i32",
         "M": "i32:1", "K": "i32", "x_stride": "i32", "met": "i32", "BLOCK_M": 16, "MET": 8},
        sm,
    )  # fmt: skip
    assert digits.local == planes.local == 0
    assert digits.wide_loads > 0
    # The four k of a word's half lie side by side, eight bytes.
    assert planes.count("LDG.E.64") > 0


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("group", [32, 128])
def test_ahead_of_time_dequantized(sm: int, group: int) -> None:
    made = compile_ahead(
        fast.dequantize_kernel,
        {"tiles_ptr": "*i16", "weight_scale_ptr": "*bf16", "zero_ptr": "*bf16", "w_ptr": "*bf16",
         "N": "i32", "K": "i32", "first": "i32", "GROUP": group, "ZERO": True, "ASM": True,
         "HALF": False},
        sm,
    )  # fmt: skip
    assert made.local == 0
    assert made.wide_loads > 0
    assert made.count("STG.E.128") > 0
    assert made.count("I2F") + made.count("I2FP") == 0


@pytest.mark.parametrize("sm", [80, 90])
def test_ahead_of_time_vector(sm: int) -> None:
    made = compile_ahead(
        fast.vector_kernel,
        {**POINTERS, "even_ptr": "*i32", "odd_ptr": "*i32", "sum_ptr": "*fp32",
         "scale_ptr": "*fp32", "N": "i32", "K": 8192, "GROUP": 128, "ZERO": False, "ASM": True,
         "T": 256, "ROWS": 2, "TURNS": 16, "SPLITS": 1, "MASKED": False},
        sm, num_warps=4,
    )  # fmt: skip
    assert made.local == 0
    assert made.wide_loads >= 2
    assert "dp4a" in made.ptx


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        (1, 4096, 28672, 128),
        (1, 4100, 28680, 128),
        (16, 4100, 8200, 128),
        (64, 1000, 4096, 128),
        (300, 1000, 4096, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_on_a_gpu(case: tuple[int, int, int, int], dtype: Any, zeros: bool) -> None:
    x, packed, w, budget = _drawn(*case, dtype, zeros)
    given: list[Any] = list(packed)
    there = Int4Weight(*(one.cuda() if isinstance(one, torch.Tensor) else one for one in given))
    for _ in range(3):
        z = int4_matmul(x.cuda(), there).cpu()
        assert ((z.double() - x.double() @ w.T).abs() <= budget).all()
