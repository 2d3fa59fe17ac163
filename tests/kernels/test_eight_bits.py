"""Products of 8 bits by 8 bits on the GPU, and rows of activations that become 8 bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import numpy as np  # noqa: E402

import lowbit_lab  # noqa: E402
from lowbit.kernels.triton.ahead import compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import scaled, scaled_blocks, tables  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu, forget_choices  # noqa: E402
from lowbit.kernels.triton.fast.quantize_rows import quantize_rows_kernel  # noqa: E402
from lowbit.kernels.triton.fast.scaled import ScaledConfig, scaled_choice  # noqa: E402
from lowbit.kernels.triton.fast.scaled_blocks import BlocksConfig  # noqa: E402
from lowbit.kernels.triton.fast.tiles import Extra  # noqa: E402
from lowbit.numerics.affine import quantize_rows as in_numpy  # noqa: E402
from lowbit.torch.functional import quantize_rows, scaled_matmul  # noqa: E402

GPU = torch.cuda.is_available()
H200 = Gpu(90, 132)
FLOAT8 = torch.float8_e4m3fn


def _rows(m: int, k: int) -> Any:
    """Among them one of zeros, one of a NaN, one that hardly is, and one that is large."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0))
    if m > 4:
        x[0], x[1, k // 2] = 0.0, float("nan")
        x[2], x[3] = x[2] * 1e-37, x[3] * 1e30
    return x


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("interpreted", [False, True])
def test_rows_become_what_numpy_gives(symmetric: bool, interpreted: bool) -> None:
    for m, k in ((7, 301), (1, 16), (3, 128)):
        x = _rows(m, k)
        if interpreted:
            with lowbit_lab.interpreter():
                q, scale, zero = quantize_rows(x, symmetric=symmetric)
        else:
            q, scale, zero = quantize_rows(x, symmetric=symmetric)
        codes, scales, zeros = in_numpy(x.numpy(), symmetric)
        np.testing.assert_array_equal(scale.numpy(), scales)
        np.testing.assert_array_equal(q.numpy(), codes.astype(int) - 128)
        assert (zero is None) == symmetric
        if zero is not None:
            np.testing.assert_array_equal(zero.numpy(), zeros - 128)


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
@pytest.mark.parametrize("blocks", [False, True])
def test_scales_in_the_interpreter(dtype: Any, blocks: bool) -> None:
    for m, k in ((6, 300), (3, 128), (0, 8)):
        x = _rows(m, k).bfloat16()
        plain = quantize_rows(x, dtype, blocks=blocks)
        with lowbit_lab.interpreter():
            found = quantize_rows(x, dtype, blocks=blocks)
        torch.testing.assert_close(plain[1], found[1], rtol=0, atol=0, equal_nan=True)
        assert plain[0].dtype == found[0].dtype == dtype
        if dtype == torch.int8:
            assert torch.equal(plain[0], found[0])
    with pytest.raises(ValueError, match="only int8 without blocks"):
        quantize_rows(_rows(2, 8), FLOAT8, symmetric=False)


def _factors(m: int, n: int, k: int, dtype: Any, blocks: bool, zero: bool) -> Any:
    made = torch.Generator().manual_seed(1)
    x, w = (torch.randn(rows, k, generator=made) for rows in (m, n))
    if dtype == torch.int8:
        x, w = x * 30, w * 30
    x, w = (one.clamp(-127, 127).to(dtype) for one in (x, w))
    shapes = ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))) if blocks else ((m,), (n,))
    scales = [torch.rand(*shape, generator=made) * 0.01 for shape in shapes]
    zeros = torch.randint(-128, 128, (m,), generator=made, dtype=torch.int32) if zero else None
    sums = w.to(torch.int32).sum(1, dtype=torch.int32) if zero else None
    return x, w, *scales, zeros, sums


def _exact(x: Any, w: Any, x_scale: Any, w_scale: Any, zeros: Any, _: Any) -> tuple[Any, Any]:
    """The product in float64, and that of absolute values."""
    left, right = x.double(), w.double()
    if zeros is not None:
        left = left - zeros.double()[:, None]
    if w_scale.dim() == 2:
        each = torch.arange(x.shape[1]) // 128
        left = left * x_scale.double()[:, each]
        right = right * w_scale.double()[torch.arange(len(w)) // 128][:, each]
    else:
        left, right = left * x_scale.double()[:, None], right * w_scale.double()[:, None]
    return left @ right.T, left.abs() @ right.abs().T


FORMS = [(torch.int8, False, False), (torch.int8, False, True), (FLOAT8, False, False),
         (FLOAT8, True, False)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "blocks", "zero"), FORMS)
def test_products_by_pytorch(dtype: Any, blocks: bool, zero: bool) -> None:
    factors = _factors(5, 70, 300, dtype, blocks, zero)
    x, w, x_scale, w_scale, zeros, sums = factors
    exact, _ = _exact(*factors)
    bias, residual = torch.randn(70), torch.randn(5, 70)
    z = scaled_matmul(x, w, x_scale, w_scale, bias, x_zero=zeros, w_sum=sums, activation="relu",
                      residual=residual, dtype=torch.float32)  # fmt: skip
    expected = torch.relu(exact + bias.double()) + residual.double()
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)
    arguments = (x, w, x_scale, w_scale, zeros, sums, bias, residual, "silu", torch.bfloat16)
    if dtype == torch.int8:  # of float8 PyTorch's check has too few functions
        torch.library.opcheck(torch.ops.lowbit.scaled_matmul.default, arguments)


def test_errors_say_what_to_give() -> None:
    x, w, x_scale, w_scale, *_ = _factors(5, 70, 300, torch.int8, False, False)
    with pytest.raises(TypeError, match="w is float32"):
        scaled_matmul(x, w.float(), x_scale, w_scale)
    with pytest.raises(ValueError, match=r"must be \[5\]"):
        scaled_matmul(x, w, w_scale, w_scale)
    with pytest.raises(ValueError, match="or neither"):
        scaled_matmul(x, w, x_scale, w_scale, x_zero=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match="give one of"):
        scaled_matmul(x, w, x_scale, w_scale, activation="tanh")
    with pytest.raises(TypeError, match="int8 or"):
        quantize_rows(torch.zeros(2, 2), torch.int16)


@pytest.mark.parametrize(
    ("sizes", "blocks", "itemsize", "cuda", "refusal"),
    [
        ((256, 4096, 4096), False, 2, "12.0", ""),
        ((255, 4096, 4096), False, 2, "13.0", "x has 255 rows"),
        ((256, 4096, 4104), False, 2, "13.0", "no multiple of 16"),
        ((256, 4096, 4096), False, 4, "13.0", "to 16 bits"),
        ((80, 4096, 4096), True, 2, "13.0", ""),
        ((80, 4096, 4096), True, 2, "12.8", "CUDA 12.9"),
        ((80, 4096, 4096), True, 2, None, "CUDA 12.9"),
        ((84, 4096, 4096), True, 2, "13.0", "M of 16"),
        ((80, 4096, 4112), True, 2, "13.0", "no multiple of 128"),
    ],
)
def test_when_cublas_multiplies_float8(
    sizes: tuple[int, int, int], blocks: bool, itemsize: int, cuda: str | None, refusal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", cuda)
    forget_choices()
    choice = scaled_choice(H200, *sizes, "float8_e4m3fn", blocks, itemsize)
    assert (choice.kernel == "cuBLAS") is (not refusal)
    assert refusal in "".join(why for _, why in choice.refused)
    forget_choices()


def test_what_is_chosen() -> None:
    assert scaled_choice(Gpu(80, 108), 5, 64, 64).kernel == "PyTorch in float32"
    assert scaled_choice(H200, 512, 4096, 4096, "float8_e4m3fn").kernel == "cuBLAS"
    assert scaled_choice(H200, 512, 4096, 4096).kernel == "scaled_kernel"
    assert scaled_choice(H200, 9, 4096, 4096, blocks=True).kernel == "scaled_blocks_kernel"
    assert "shared memory" in str(ScaledConfig(256, 256, 1, 8, 4).refusal(2))
    assert "shared memory" in str(BlocksConfig(3, 1, 6).refusal(2))
    assert "give 1, 2 or 3" in str(BlocksConfig(4, 1, 2).refusal(2))


def _chosen() -> list[tuple[int, bool, int, Any]]:
    """Every configuration that is chosen for many sizes, or that a table has, with one number of
    rows, and the bytes of an element of the result."""
    found = dict[Any, tuple[int, bool, int, Any]]()
    for m in (1, 16, 17, 64, 100, 128, 256, 1000, 4096):
        for n in (64, 1000, 4096, 14336, 28672):
            for blocks in (False, True):
                for k, itemsize in itertools.product((128, 4096, 28672), (2, 4)):
                    config = scaled_choice(H200, m, n, k, "int8", blocks, itemsize).config
                    kind = config, blocks, itemsize
                    found.setdefault(kind, (min(m, 300), blocks, itemsize, config))
    for path in tables.OWN.glob("*.json"):
        for key, entry in tables.read(path)[1].items():
            if key.kernel == "scaled_kernel":
                config = ScaledConfig(**entry["config"])
                found.setdefault((config, False, 2), (min(key.M, 300), False, 2, config))
    return list(found.values())


CHOSEN = pytest.mark.parametrize(("m", "blocks", "itemsize", "config"), _chosen(), ids=str)


@CHOSEN
def test_what_is_chosen_fits(m: int, blocks: bool, itemsize: int, config: Any) -> None:
    assert config.refusal(itemsize) is None


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "zero"), [("i8", True), ("fp8e4nv", False)])
def test_ahead_of_time(kind: str, zero: bool) -> None:
    from triton.experimental.gluon import language

    gl: Any = language
    w, x = (gl.NVMMASharedLayout.get_default_for([rows, 128], gl.int8) for rows in (128, 64))
    made = compile_ahead(
        scaled.scaled_kernel,
        {"w_desc": f"tensordesc<{kind}[128,128],{w!r}>", "w_scale_ptr": "*fp32",
         "x_desc": f"tensordesc<{kind}[64,128],{x!r}>", "x_scale_ptr": "*fp32",
         "x_zero_ptr": "*i32", "w_sum_ptr": "*i32", "z_ptr": "*bf16", "bias_ptr": "*bf16",
         "residual_ptr": "*bf16", "part_ptr": "*fp32", "met_ptr": "*i32", "M": "i32:1",
         "N": "i32", "K": "i32", "ZERO": zero, "BIAS": True, "RESIDUAL": False,
         "ACTIVATION": "gelu", "STAGES": 4, "SPLITS": 1},
        90, num_warps=4,
    )  # fmt: skip
    assert made.local == 0
    assert made.count("IGMMA" if kind == "i8" else "QGMMA") >= 8
    assert made.count("UTMALDG") >= 2
    # While a product runs, the next is loaded.
    assert "wgmma.wait_group.sync.aligned 1" in made.ptx


@pytest.mark.deep
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_blocks_ahead_of_time(groups: int) -> None:
    from triton.experimental.gluon import language

    gl: Any = language
    w, x = (gl.NVMMASharedLayout.get_default_for([rows, 128], gl.int8) for rows in (128, 64))
    made = compile_ahead(
        scaled_blocks.scaled_blocks_kernel,
        {"w_desc": f"tensordesc<fp8e4nv[128,128],{w!r}>", "w_scale_ptr": "*fp32",
         "x_desc": f"tensordesc<fp8e4nv[64,128],{x!r}>", "x_scale_ptr": "*fp32", "z_ptr": "*bf16",
         "bias_ptr": "*bf16", "residual_ptr": "*bf16", "part_ptr": "*fp32", "met_ptr": "*i32",
         "M": "i32:1", "N": "i32", "K": "i32", "BIAS": True, "RESIDUAL": False,
         "ACTIVATION": "gelu", "GROUPS": groups, "STAGES": 4, "SPLITS": 1,
         "REGISTERS": scaled_blocks.REGISTERS[groups]},
        90, num_warps=4,
    )  # fmt: skip
    assert made.local == 0
    assert made.count("QGMMA") == 4 * groups
    # Products of a group of warps follow each other without a wait in between.
    assert made.sass.count("WARPGROUP.DEPBAR") == groups


def _moved(factors: Any) -> Any:
    return [None if one is None else one.cuda() for one in factors]


@pytest.mark.deep
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@CHOSEN
def test_every_configuration_on_a_gpu(m: int, blocks: bool, itemsize: int, config: Any) -> None:
    """Twice, for the counters of what is cut along K must be zeros again."""
    for dtype, _, zero in [form for form in FORMS if form[1] == blocks]:
        factors = _factors(m, 1000, 4096, dtype, blocks, zero)
        exact, mass = _exact(*factors)
        x, w, *scales = _moved(factors)
        for _ in range(2):
            to = torch.float32 if itemsize == 4 else torch.bfloat16
            z = scaled._launched(x, w, scales, Extra(), to, config).cpu()
            budget = 2.0**-20 * mass if dtype == torch.int8 else 2.0**-11 * mass
            if itemsize == 2:
                budget += 2.0**-8 * exact.abs()
            assert ((z.double() - exact).abs() <= budget + 1e-6).all()


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rows_ahead_of_time(symmetric: bool, sm: int) -> None:
    made = compile_ahead(
        quantize_rows_kernel,
        {"x_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32", "zero_ptr": "*i32", "K": "i32",
         "x_stride": "i32", "BLOCK": 4096, "INT": True, "SYMMETRIC": symmetric, "GROUP": 0,
         "TILED": symmetric},
        sm,
    )  # fmt: skip
    assert made.local == 0
    assert made.wide_loads > 0


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "shape", [(1, 64, 128), (6, 70, 300), (300, 1000, 2048), (48, 256, 512), (272, 384, 1024),
     (4100, 3000, 256)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "blocks", "zero"), FORMS)
def test_on_a_gpu(shape: tuple[int, int, int], dtype: Any, blocks: bool, zero: bool) -> None:
    factors = _factors(*shape, dtype, blocks, zero)
    exact, mass = _exact(*factors)
    x, w, x_scale, w_scale, zeros, sums = _moved(factors)
    x_scale, w_scale = (torch.stack([one, one], -1)[..., 0] for one in (x_scale, w_scale))
    bias = torch.randn(shape[1], 2).cuda()[:, 0]  # no strides of 1
    residual = torch.randn(len(x), len(w)).bfloat16()
    extra = {"activation": "relu", "residual": residual.cuda()}
    z = scaled_matmul(x, w, x_scale, w_scale, bias, x_zero=zeros, w_sum=sums, **extra)
    expected = torch.relu(exact + bias.cpu().double()) + residual.double()
    budget = 2.0**-8 * expected.abs() + 2.0**-11 * mass + 1e-5
    assert ((z.cpu().double() - expected).abs() <= budget).all()
    floats = _rows(shape[0], shape[2]).bfloat16()
    here = quantize_rows(floats, dtype, symmetric=not zero, blocks=blocks)
    there = quantize_rows(floats.cuda(), dtype, symmetric=not zero, blocks=blocks)
    torch.testing.assert_close(there[1].cpu(), here[1], rtol=0, atol=0, equal_nan=True)
    if dtype == torch.int8:
        assert torch.equal(there[0].cpu(), here[0])
    else:
        assert (there[0].cpu().float() == here[0].float())[here[1].isfinite().all(-1)].all()
