"""Products of activations of 8 bits by a weight of 4 on the GPU: the operator, the choice, the
machine code; and on a GPU every configuration that can be chosen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import lowbit_lab  # noqa: E402
from lowbit.kernels.triton.ahead import compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import eight_by_four  # noqa: E402
from lowbit.kernels.triton.fast.eight_by_four import (  # noqa: E402
    EightByFourConfig,
    eight_by_four_choice,
)
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402
from lowbit.kernels.triton.fast.quantize_rows import quantize_rows as tiled_rows  # noqa: E402
from lowbit.kernels.triton.fast.tiles import Extra, TiledWeight  # noqa: E402
from lowbit.torch.functional import (  # noqa: E402
    int4_dynamic_matmul,
    pack_int4,
    pack_int8,
    quantize_rows,
)

GPU = torch.cuda.is_available()
H200 = Gpu(90, 132)
DTYPES = [torch.int8, torch.float8_e4m3fn]
KINDS = ["middle", "whole", "real"]


def _generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def _drawn(n: int, k: int, group: int, kind: str) -> tuple[TiledWeight, Any]:
    """A packed weight and what it stands for in float64; some groups have the scale 0."""
    made, groups = _generator(), -(-k // group)
    scale = (torch.rand(n, groups, generator=made) * 0.02 - 0.002).clamp(min=0).bfloat16()
    values = torch.randint(0, 16, (n, k), generator=made, dtype=torch.uint8)
    zero = {
        "middle": None,
        "whole": torch.randint(0, 17, (n, groups), generator=made),
        "real": torch.rand(n, groups, generator=made) * 15,
    }[kind]
    at = torch.arange(k) // group
    centre = 8.0 if zero is None else zero.double()[:, at]
    packed = pack_int4(values, scale, zero, group_size=group)
    return packed, (values.double() - centre) * scale.double()[:, at]


def _rounded(x: Any, dtype: Any) -> Any:
    """What rows of 8 bits stand for, float64."""
    q, scale, _ = quantize_rows(x, dtype)
    return q.double() * scale.double()[:, None]


def _budget(exact: Any, mass: Any, x: Any, dtype: Any) -> Any:
    """Sums in float32, of float8 with the precision of the matrix units; one rounding."""
    sums = 2.0**-18 if dtype == torch.int8 else 2.0**-11
    return sums * mass + torch.finfo(x.dtype).eps * exact.abs() + 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interpreted", [False, True])
def test_products(dtype: Any, kind: str, interpreted: bool) -> None:
    for m, n, k, group in ((3, 70, 256, 128), (40, 33, 296, 96)):
        packed, w = _drawn(n, k, group, kind)
        x = torch.randn(m, k, generator=_generator(1))
        rounded = _rounded(x, dtype)
        exact, mass = rounded @ w.T, rounded.abs() @ w.abs().T
        if interpreted and dtype == torch.int8:  # which does not round to float8 as a GPU does
            with lowbit_lab.interpreter():
                z = int4_dynamic_matmul(x, packed, dtype=dtype)
        else:
            z = int4_dynamic_matmul(x, packed, dtype=dtype)
        budget = _budget(exact, mass, x, dtype) + (2.0**-6 * mass if kind == "real" else 0.0)
        assert ((z.double() - exact).abs() <= budget).all()


def test_rows_in_the_order_of_tiles() -> None:
    x = torch.randn(5, 300, generator=_generator())
    plain, scale, _ = quantize_rows(x)
    with lowbit_lab.interpreter():
        q, found, _ = tiled_rows(x, torch.int8, symmetric=True, blocks=False, tiled=True)
    assert torch.equal(found, scale)
    held = q.view(5, -1, 8, 2).transpose(2, 3).reshape(5, -1)
    assert torch.equal(held[:, :300], plain)
    assert not held[:, 300:].any()


@pytest.mark.deep
def test_the_operator() -> None:
    packed, w = _drawn(70, 256, 64, "whole")
    x = torch.randn(6, 256, generator=_generator()).bfloat16()
    z = int4_dynamic_matmul(x, packed, activation="relu")
    assert torch.equal(
        int4_dynamic_matmul(x.view(3, 2, 256), packed, activation="relu"), z.view(3, 2, 70)
    )
    assert int4_dynamic_matmul(x[:0], packed).shape == (0, 70)
    arguments = (x, *vars(packed).values(), x[0, :70], z, "silu", torch.int8)
    torch.library.opcheck(torch.ops.lowbit.int4_dynamic_matmul.default, arguments)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(int4_dynamic_matmul(x, packed).sum(), x)
    torch.testing.assert_close(dx[0].double(), w.sum(0), rtol=2.0**-6, atol=2.0**-6)
    compiled = torch.compile(int4_dynamic_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.detach(), packed), int4_dynamic_matmul(x.detach(), packed))


def test_errors_say_what_to_give() -> None:
    packed, _ = _drawn(70, 256, 128, "middle")
    x = torch.zeros(2, 256)
    with pytest.raises(TypeError, match=r"dtype is torch\.int16; give"):
        int4_dynamic_matmul(x, packed, dtype=torch.int16)
    wide = pack_int8(torch.zeros(64, 256, dtype=torch.int8), torch.ones(64))
    with pytest.raises(ValueError, match="has 8 bits"):
        int4_dynamic_matmul(x, wide)
    with pytest.raises(ValueError, match="last dimension must be 256"):
        int4_dynamic_matmul(x[:, :9], packed)


@pytest.mark.parametrize(
    ("gpu", "M", "itemsize", "real", "kernel", "reason"),
    [
        (H200, 33, 2, False, "eight_by_four_kernel", ""),
        (H200, 1, 4, False, "eight_by_four_kernel", ""),
        (H200, 32, 2, False, "few_rows_kernel", "memory is the limit"),
        (H200, 33, 2, True, "many_rows_kernel", "no integers"),
        (Gpu(80, 108), 33, 2, False, "dequantize_kernel and cuBLAS", "no wgmma"),
    ],
)
def test_which_kernel_serves(
    gpu: Gpu, M: int, itemsize: int, real: bool, kernel: str, reason: str
) -> None:
    choice = eight_by_four_choice(gpu, M, 4096, 4096, itemsize, 128, real)
    assert choice.kernel == kernel
    assert not reason or reason in choice.refused[0][1]


def _chosen() -> list[Any]:
    """What is chosen for many sizes: M, the group, and each configuration once."""
    found = dict[Any, int]()
    rows, sizes = (1, 64, 65, 129, 300, 4096), (5, 1024, 4096, 14336, 28672)
    for m, n, k, group in itertools.product(rows, sizes, (520, 4096), (128, 64, 32)):
        config = eight_by_four_choice(H200, m, n, k, 4, group).config
        found.setdefault((group, config), min(m, 300))
    return [(m, *key) for key, m in found.items()]


CHOSEN = pytest.mark.parametrize(("m", "group", "config"), _chosen(), ids=str)


@CHOSEN
def test_what_is_chosen_fits(m: int, group: int, config: EightByFourConfig) -> None:
    assert config.refusal(group) is None


def test_configurations_that_do_not_fit() -> None:
    assert "4 warps takes 16" in str(EightByFourConfig(128, 64, 1, 4, 3).refusal(128))
    assert "shared memory" in str(EightByFourConfig(128, 256, 1, 8, 6).refusal(128))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "group", "zero", "columns", "warps"),
    [("i8", 128, True, 256, 8), ("i8", 128, False, 128, 4), ("i8", 64, True, 128, 4),
     ("fp8e4nv", 128, True, 128, 4), ("fp8e4nv", 32, True, 64, 4)],
)  # fmt: skip
def test_ahead_of_time(kind: str, group: int, zero: bool, columns: int, warps: int) -> None:
    from triton.experimental.gluon import language

    gl: Any = language
    wide, piece = EightByFourConfig(16 * warps, columns, 1, warps, 3).wide, min(group, 128)
    x = gl.NVMMASharedLayout.get_default_for([columns, piece], gl.int8)
    made = compile_ahead(
        eight_by_four.eight_by_four_kernel,
        {"x_desc": f"tensordesc<{kind}[{columns},{piece}],{x!r}>", "x_scale_ptr": "*fp32",
         "tiles_ptr": "*i8", "words_ptr": "*i32", "z_ptr": "*bf16", "bias_ptr": "*bf16",
         "residual_ptr": "*bf16", "part_ptr": "*fp32", "met_ptr": "*i32", "M": "i32:1",
         "N": "i32", "K": "i32", "padded": "i32", "GROUP": group, "ZERO": zero, "BIAS": True,
         "RESIDUAL": False, "ACTIVATION": "", "WIDE": wide, "STAGES": 3, "SPLITS": 1},
        90, num_warps=warps,
    )  # fmt: skip
    # Of the largest tiles a few numbers, by the assembler of Triton 3.9; none by that of 3.6.
    assert made.local <= (128 if columns == 256 else 0)
    parts = columns // wide
    assert made.count("IGMMA" if kind == "i8" else "QGMMA") == 4 * parts
    # Those of a group follow each other without a wait in between.
    assert made.sass.count("WARPGROUP.DEPBAR") == parts * 128 // piece
    assert made.count("LDGSTS.E.BYPASS.128") > 0
    assert made.count("UTMALDG") >= 2


def _moved(packed: TiledWeight) -> TiledWeight:
    given = vars(packed).values()
    return TiledWeight(*(one.cuda() if isinstance(one, torch.Tensor) else one for one in given))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@CHOSEN
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_configuration_on_a_gpu(
    m: int, group: int, config: EightByFourConfig, dtype: Any
) -> None:
    """Twice, for the counters of what is cut along K must be zeros again."""
    for kind in KINDS[:2]:
        packed, w = _drawn(1000, 4112, group, kind)
        x = torch.randn(m, 4112, generator=_generator(1))
        rounded = _rounded(x, dtype)
        exact, mass = rounded @ w.T, rounded.abs() @ w.abs().T
        for _ in range(2):
            z = eight_by_four._launched(x.cuda(), _moved(packed), Extra(), dtype, config).cpu()
            assert ((z.double() - exact).abs() <= _budget(exact, mass, x, dtype)).all()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(dtype: Any, kind: str, floats: Any) -> None:
    for m, n, k, group in ((3, 70, 256, 128), (96, 333, 1000, 32), (300, 1000, 2056, 256)):
        packed, w = _drawn(n, k, group, kind)
        made = _generator(1)
        x, bias, residual = (
            torch.randn(*shape, generator=made).to(floats) for shape in ((m, k), (n,), (m, n))
        )
        few = m <= 32 and floats.itemsize == 2
        rounded = x.double() if few else _rounded(x, dtype)
        exact, mass = rounded @ w.T, rounded.abs() @ w.abs().T
        exact = torch.nn.functional.silu(exact + bias.double()) + residual.double()
        weight = _moved(packed)
        given = x.cuda().T.contiguous().T, weight, bias.cuda()
        extra = {"activation": "silu", "residual": residual.cuda(), "dtype": dtype}
        z = int4_dynamic_matmul(*given, **extra).cpu()
        budget = _budget(exact, mass, x, dtype) + torch.finfo(floats).eps
        if kind == "real":  # served by another kernel, which takes floats
            budget += (2.0**-6 + 2 * torch.finfo(floats).eps) * mass
        elif few:
            budget += 2 * torch.finfo(floats).eps * mass
        assert ((z.double() - exact).abs() <= budget).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = int4_dynamic_matmul(*given, **extra)
        graph.replay()
        assert torch.equal(again.cpu(), z)
    odd = torch.randn(40, 256, generator=_generator()).to(floats)
    odd[7, 9] = float("inf")
    z = int4_dynamic_matmul(odd.cuda(), _moved(_drawn(70, 256, 128, kind)[0]), dtype=dtype)
    assert (~z[7].isfinite()).all()
    assert z[:7].isfinite().all()
