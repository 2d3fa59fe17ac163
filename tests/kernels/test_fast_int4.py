"""4-bit products on the GPU: in the interpreter here, ahead of time for two GPUs, and on one."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import lowbit.lab  # noqa: E402
from lowbit.kernels.triton.ahead import compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import int4_matmul as int4_matmul_kernels  # noqa: E402
from lowbit.kernels.triton.fast import int4_one_row, int4_planes  # noqa: E402
from lowbit.kernels.triton.fast.int4_matmul import int4_choice  # noqa: E402
from lowbit.kernels.triton.fast.launch import INTERPRETER, Gpu  # noqa: E402
from lowbit.kernels.triton.fast.tiles import TILE_DEPTH, TILE_ROWS  # noqa: E402
from lowbit.torch.functional import Int4Weight, int4_matmul, pack_int4  # noqa: E402

GPU = torch.cuda.is_available()
H200 = Gpu(90, 132)


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
    # n·x, with the exponent's 128 in the kernel of many rows and bfloat16. Then one rounding to the
    # dtype.
    greatest = x.double().abs().amax(1, keepdim=True) * 2.0**-15
    offset = 128.0 if m > 1 and dtype == torch.bfloat16 else 0.0
    mass = (x.double().abs() + greatest) @ (scale.double()[:, at].T * (offset + 8 + 8))
    exact = x.double() @ w.T
    unit = torch.finfo(dtype).eps
    budget = greatest * w.abs().sum(1) + 2.0**-22 * mass + unit * exact.abs() + 1e-6
    if m > 128 or (m > 1 and group % TILE_DEPTH):  # the weight is rounded too
        budget = budget + unit * (x.double().abs() @ w.abs().T)
    return x, packed, w, budget


CASES = [(1, 64, 1024, 128), (1, 70, 128, 32), (1, 130, 520, 64), (1, 33, 296, 96),
         (1, 67, 1000, 1024), (1, 5, 8, 32), (3, 70, 256, 128), (17, 65, 392, 128),
         (33, 64, 640, 256), (70, 66, 136, 128), (6, 66, 136, 64), (2, 5, 8, 32)]  # fmt: skip


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


def _one_row(x: Any, packed: Int4Weight, *config: int) -> Any:
    if config:
        cut = int4_one_row.VectorConfig(*config)
    else:
        cut = int4_one_row.vector_config(INTERPRETER, packed.N, packed.K)
    with lowbit.lab.interpreter():
        return int4_one_row.vector(x, packed, cut)


@pytest.mark.parametrize("config", [(1, 4, 1, 3), (4, 4, 3, 5), (64, 8, 1, 2)], ids=str)
@pytest.mark.parametrize("n", [64, 67])
def test_one_row_however_it_is_cut(config: tuple[int, ...], n: int) -> None:
    x, packed, _, _ = _drawn(1, n, 328, 64, torch.bfloat16, True)
    assert torch.equal(_one_row(x, packed, *config), _one_row(x, packed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_one_row_with_a_number_that_is_none(dtype: Any, odd: float) -> None:
    x, packed, _, _ = _drawn(1, 67, 328, 64, dtype, False)
    for k in (0, 5, 130, 327):
        wrong = x.clone()
        wrong[0, k] = odd
        assert _one_row(wrong, packed).isnan().all()


@pytest.mark.parametrize("exponent", [-133, -126, -120, -110, -100, 120])
def test_one_row_of_tiny_and_of_huge_numbers(exponent: int) -> None:
    """Steps are 2**-126 at least; between them and 2**-111, x has fewer than 16 bits."""
    x, packed, w, _ = _drawn(1, 67, 328, 64, torch.bfloat16, True)
    x = (x.double() * 2.0**exponent).bfloat16()
    step = max(float(x.double().abs().max()) * 2.0**-15, 2.0**-126)
    exact = x.double() @ w.T
    # float32 has no bits below 2**-149, which matter in the few sums that are as small as this.
    budget = step * w.abs().sum(1) + 2.0**-8 * exact.abs() + 2.0**-133 * len(w[0])
    assert ((_one_row(x, packed).double() - exact).abs() <= budget).all()


def test_one_row_of_parts_of_all_sizes() -> None:
    """Each 32 k have their own scale: large numbers, here where the weight is 0, do not disturb."""
    made = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (67, 160), generator=made, dtype=torch.uint8)
    values[:, :32] = 8
    packed = pack_int4(values, torch.full((67, 5), 0.01), group_size=32)
    w = (values.double() - 8) * 0.01
    x = (torch.randn(1, 160, generator=made) * 2e-4).bfloat16()
    x[0, :32], x[0, 32:64], x[0, 64:96] = 1e6, 0.0, 2.0**-130
    exact = x.double() @ w.T
    budget = 2.0**-15 * 1e-3 * w.abs().sum(1) + 2.0**-8 * exact.abs()
    assert ((_one_row(x, packed).double() - exact).abs() <= budget).all()
    assert (_one_row(torch.zeros_like(x), packed) == 0).all()


def test_sums_that_cancel_in_float16() -> None:
    """An offset of 1024 in each product would show: all of x have one sign."""
    x, packed, w, budget = _drawn(7, 13, 128, 128, torch.float16, False)
    x = -x.abs()
    exact = x.double() @ w.T
    with lowbit.lab.interpreter():
        z = int4_matmul(x, packed).double()
    budget = 2.0**-22 * (x.double().abs() @ w.abs().T) + 2.0**-11 * exact.abs() + 1e-6
    assert ((z - exact).abs() <= budget).all()


@pytest.mark.parametrize("group", [64, 128])
def test_one_row_that_is_too_long_for_registers(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, packed, w, _ = _drawn(1, 67, 328, group, torch.bfloat16, True)
    served = list[str]()
    choose = inspect.unwrap(int4_choice)  # without its cache
    monkeypatch.setattr(int4_matmul_kernels, "int4_choice", choose)
    for most in (328, 327):
        monkeypatch.setattr(int4_one_row, "MOST_DEPTH", most)
        with lowbit.lab.interpreter():
            z = int4_matmul(x, packed).double()
        exact = x.double() @ w.T
        assert ((z - exact).abs() <= 2.0**-7 * (x.double().abs() @ w.abs().T)).all()
        served.append(choose(INTERPRETER, 1, 67, 328, group, 2).kernel)
    other = "rows_kernel" if group == 128 else "dequantize_kernel and cuBLAS"
    assert served == ["one_row_kernel", other]


@pytest.mark.parametrize(
    ("M", "K", "group", "itemsize", "kernel", "reasons"),
    [
        (1, 32768, 32, 2, "one_row_kernel", []),
        (1, 32769, 128, 2, "rows_kernel", ["K is 32769; the digits of 32768 fit"]),
        (2, 4096, 128, 2, "rows_kernel", ["x has 2 rows, and it takes one"]),
        (128, 4096, 256, 2, "rows_kernel", ["x has 128 rows"]),
        (129, 64, 128, 2, "dequantize_kernel and cuBLAS", ["x has 129 rows", "above 128"]),
        (2, 64, 64, 2, "dequantize_kernel and cuBLAS", ["x has 2 rows", "groups of 64"]),
        (1, 64, 128, 4, "dequantize_kernel and cuBLAS", ["digits have 16", "take 16 bits"]),
    ],
)
def test_which_kernel_serves_and_why_others_do_not(
    M: int, K: int, group: int, itemsize: int, kernel: str, reasons: list[str]
) -> None:
    choice = int4_choice(H200, M, 4096, K, group, itemsize)
    assert choice.kernel == kernel
    assert len(choice.refused) == len(reasons)
    for (_, why), reason in zip(choice.refused, reasons, strict=True):
        assert reason in why


def test_how_one_row_is_cut() -> None:
    """As the H200, which has 132 multiprocessors, did best."""
    config, made = int4_one_row.vector_config, int4_one_row.VectorConfig
    assert config(H200, 28672, 8192) == made(2, 4, 3, 4)
    assert config(H200, 8192, 28672) == made(1, 8, 3, 2)
    assert config(H200, 4096, 4096) == made(4, 4, 1, 4)
    for n, depth in itertools.product((1, 64, 5000, 10**6), (8, 200, 4096, 20000, 32768)):
        assert TILE_ROWS % config(H200, n, depth).rows == 0


def test_configurations_of_one_row_that_do_not_fit() -> None:
    assert "rows is 128; a tile has 64" in str(int4_one_row.VectorConfig(128, 4, 1, 1).refusal())
    assert "power of two" in str(int4_one_row.VectorConfig(3, 4, 1, 1).refusal())
    assert "programs is 0" in str(int4_one_row.VectorConfig(4, 4, 1, 0).refusal())
    x, packed, _, _ = _drawn(1, 70, 256, 128, torch.bfloat16, False)
    with pytest.raises(ValueError, match="does not fit: rows is 128"):
        int4_one_row.vector(x, packed, int4_one_row.VectorConfig(128, 4, 1, 1))


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
    arguments = (x, *vars(packed).values())
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
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        int4_matmul(torch.ones(2, 64).double(), packed)
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


POINTERS = {"tiles_ptr": "*i32", "weight_scale_ptr": "*bf16", "zero_ptr": "*bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("half", [False, True])
def test_ahead_of_time_rows(sm: int, half: bool) -> None:
    kind = "*fp16" if half else "*bf16"
    made = compile_ahead(
        int4_planes.rows_kernel,
        {**POINTERS, "tiles_ptr": "*i16", "z_ptr": kind, "planes_ptr": kind, "sums_ptr": "*fp32",
         "partial_ptr": "*fp32", "met_ptr": "*i32", "M": "i32:1", "N": "i32", "K": "i32",
         "GROUP": 128, "ZERO": False, "ASM": True, "HALF": half, "BLOCK_M": 16, "SPLITS": 4},
        sm, num_warps=4, num_stages=3,
    )  # fmt: skip
    assert made.local == 0
    assert made.count("HGMMA" if sm == 90 else "HMMA") >= 4
    assert "cp.async" in made.ptx or made.wide_loads
    # No conversion of single nibbles: bits only. float16 takes 1024 + 8 off two at a time.
    assert made.count("I2F") + made.count("I2FP") == 0
    assert made.count("HADD2") == (32 if half else 0)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
def test_ahead_of_time_what_is_made_of_x(sm: int) -> None:
    planes = compile_ahead(
        int4_planes.planes_kernel,
        {"x_ptr": "*bf16", "planes_ptr": "*bf16", "sums_ptr": "*fp32", "met_ptr": "*i32",
         "M": "i32:1", "K": "i32", "x_stride": "i32", "met": "i32", "BLOCK_M": 16, "MET": 8},
        sm,
    )  # fmt: skip
    assert planes.local == 0
    # The four k of a word's half lie side by side, eight bytes.
    assert planes.count("LDG.E.64") > 0


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("group", [32, 128])
def test_ahead_of_time_dequantized(sm: int, group: int) -> None:
    made = compile_ahead(
        int4_planes.dequantize_kernel,
        {"tiles_ptr": "*i16", "weight_scale_ptr": "*bf16", "zero_ptr": "*bf16", "w_ptr": "*bf16",
         "N": "i32", "K": "i32", "first": "i32", "GROUP": group, "ZERO": True, "ASM": True,
         "HALF": False},
        sm,
    )  # fmt: skip
    assert made.local == 0
    assert made.wide_loads > 0
    assert made.count("STG.E.128") > 0
    assert made.count("I2F") + made.count("I2FP") == 0


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("n", "depth", "group", "zeros", "half"),
    [
        (28672, 8192, 128, False, False),
        (8192, 28672, 128, False, False),
        (4096, 4096, 128, False, True),
        (8193, int4_one_row.MOST_DEPTH, 96, True, False),
        (4100, 5128, 32, True, True),
    ],
)
def test_ahead_of_time_one_row(
    sm: int,
    n: int,
    depth: int,
    group: int,
    zeros: bool,
    half: bool,
) -> None:
    config = int4_one_row.vector_config(H200, n, depth)
    kind = "*fp16" if half else "*bf16"
    made = compile_ahead(
        int4_one_row.one_row_kernel,
        {**POINTERS, "x_ptr": kind, "z_ptr": kind, "N": "i32" if n % 16 == 0 else "i32:1",
         "K": depth, "GROUP": group, "ZERO": zeros, "ASM": True,
         "PARTS": int4_one_row._parts(depth), "ROWS": config.rows, "STAGES": config.num_stages},
        sm, num_warps=config.num_warps,
    )  # fmt: skip
    # All of x's digits are in registers, and as many programs fit as are started.
    assert made.local == 0
    assert made.registers * 32 * config.num_warps * config.programs <= 65536
    assert made.count("IDP.4A") >= 64
    assert made.wide_loads >= 8
    # x is rounded without conversions, which are slow.
    assert made.count("F2I") + made.count("F2IP") == 0
    assert made.count("FFMA") >= depth // (32 * config.num_warps)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        (1, 4096, 28672, 128),
        (1, 4100, 28680, 128),
        (1, 5000, 4096, 128),
        (1, 4096, 32768, 64),
        (1, 300, 32776, 64),
        (1, 300, 32776, 128),
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
    given = vars(packed).values()
    there = Int4Weight(*(one.cuda() if isinstance(one, torch.Tensor) else one for one in given))
    for _ in range(3):
        z = int4_matmul(x.cuda(), there).cpu()
        assert ((z.double() - x.double() @ w.T).abs() <= budget).all()
