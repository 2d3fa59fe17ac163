"""Products with weights of 4 and 8 bits on the GPU: the tiles, the choice, the machine code of two
GPUs, the weight as floats in the interpreter; and on a GPU every configuration that can be chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import lowbit_lab  # noqa: E402
from lowbit.kernels.triton.ahead import compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import dequantize, few_rows, many_rows, tables, weight_only  # noqa: E402
from lowbit.kernels.triton.fast.few_rows import FewRowsConfig  # noqa: E402
from lowbit.kernels.triton.fast.launch import INTERPRETER, Gpu  # noqa: E402
from lowbit.kernels.triton.fast.many_rows import ManyRowsConfig  # noqa: E402
from lowbit.kernels.triton.fast.tiles import Extra, TiledWeight, to_tiles, to_values  # noqa: E402
from lowbit.kernels.triton.fast.weight_only import KERNELS, weight_only_choice  # noqa: E402
from lowbit.torch.functional import (  # noqa: E402
    interleaved,
    pack_int4,
    pack_int8,
    weight_only_matmul,
)

GPU = torch.cuda.is_available()
H200 = Gpu(90, 132)


def _generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def _drawn(n: int, k: int, group: int, kind: str, dtype: Any) -> tuple[TiledWeight, Any]:
    """A packed weight, and what it stands for in float64. kind: "int8", or 4 bits with zero points
    that are "middle", "whole" or "real"."""
    made, groups = _generator(), -(-k // group)
    scale = (torch.rand(n, groups, generator=made) * 0.02 + 0.001).to(dtype)
    at = torch.arange(k) // group
    if kind == "int8":
        values = torch.randint(-128, 128, (n, k), generator=made, dtype=torch.int8)
        packed = pack_int8(values, scale, group_size=group)
        return packed, values.double() * scale.double()[:, at]
    values = torch.randint(0, 16, (n, k), generator=made, dtype=torch.uint8)
    zero = {
        "middle": None,
        "whole": torch.randint(0, 16, (n, groups), generator=made),
        "real": torch.rand(n, groups, generator=made) * 15,
    }[kind]
    centre = 8.0 if zero is None else zero.double()[:, at]
    packed = pack_int4(values, scale, zero, group_size=group)
    return packed, (values.double() - centre) * scale.double()[:, at]


def _budget(x: Any, w: Any, kind: str, exact: Any) -> Any:
    """What a result may be off: K sums in float32, a weight rounded to x's dtype, a zero point
    rounded to bfloat16, and one rounding of the result."""
    unit = torch.finfo(x.dtype).eps
    mass = x.double().abs() @ w.abs().T
    budget = unit * exact.abs() + (2.0**-22 * len(w[0]) ** 0.5 + 2 * unit) * mass + 1e-6
    return budget + (2.0**-6 * mass if kind == "real" else 0.0)


KINDS = ["int8", "middle", "whole", "real"]
CASES = [(3, 70, 256, 128), (17, 65, 392, 32), (1, 130, 520, 64), (40, 33, 296, 96), (2, 5, 8, 32)]


@pytest.mark.drawn(30)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_in_the_interpreter(case: tuple[int, int, int, int], kind: str, dtype: Any) -> None:
    m, n, k, group = case
    packed, w = _drawn(n, k, group, kind, dtype)
    x = (torch.randn(m, k, generator=_generator(1)) * 3).to(dtype)
    exact = x.double() @ w.T
    with lowbit_lab.interpreter():
        z = weight_only_matmul(x, packed)
    assert z.dtype == dtype
    assert ((z.double() - exact).abs() <= _budget(x, w, kind, exact)).all()
    plain = weight_only_matmul(x, packed)
    assert ((plain.double() - exact).abs() <= _budget(x, w, "", exact)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_hold_all_values(bits: int) -> None:
    values = torch.randint(0, 1 << bits, (128, 256), generator=_generator(), dtype=torch.uint8)
    tiles = to_tiles(values, bits)
    assert tiles.shape == (8, 4, bits // 4, 32, 4)
    assert torch.equal(to_values(tiles), values)


def test_words_hold_scales_and_zero_points() -> None:
    scale = torch.tensor([[0.3, 1e-5], [2.5, 0.1]]).repeat(32, 1)
    packed = pack_int4(
        torch.zeros(64, 256, dtype=torch.uint8), scale, torch.full((64, 2), 11), group_size=128
    )
    held = (packed.words & -256).view(torch.float32).T
    assert (held / scale - 1).abs().max() <= 2.0**-16
    assert ((packed.words & 255) == 11).all()
    exact = pack_int8(torch.zeros(64, 256, dtype=torch.int8), scale.bfloat16(), group_size=128)
    assert torch.equal((exact.words & -256).view(torch.float32).T, scale.bfloat16().float())


def test_words_of_32_bits_are_packed_as_they_come() -> None:
    values = torch.randint(0, 16, (70, 256), generator=_generator(), dtype=torch.uint8)
    pairs = values.view(70, -1, 2)
    words = (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
    scale = torch.ones(70, 2)
    made = (pack_int4(one, scale, group_size=128).tiles for one in (values, words))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("gpu", "M", "itemsize", "kernel", "reasons"),
    [
        (H200, 1, 2, "few_rows_kernel", []),
        (H200, 32, 2, "few_rows_kernel", []),
        (H200, 33, 2, "many_rows_kernel", ["x has 33 rows"]),
        (H200, 1, 4, "dequantize_kernel and cuBLAS", ["float32", "float32"]),
        (Gpu(80, 108), 2, 2, "few_rows_kernel", []),
        (Gpu(80, 108), 40, 2, "dequantize_kernel and cuBLAS", ["40 rows", "no wgmma"]),
        (INTERPRETER, 1, 2, "dequantize_kernel and cuBLAS", ["mma.sync", "no wgmma"]),
    ],
)
def test_which_kernel_serves_and_why_others_do_not(
    gpu: Gpu, M: int, itemsize: int, kernel: str, reasons: list[str]
) -> None:
    choice = weight_only_choice(gpu, M, 4096, 4096, 4, itemsize)
    assert choice.kernel == kernel
    for (_, why), reason in zip(choice.refused, reasons, strict=True):
        assert reason in why


def _chosen() -> Iterable[tuple[int, int, int, Any]]:
    """What is chosen for many sizes, and what tables have: M, the bits, the group, and each
    configuration once."""
    sizes = (5, 64, 300, 1024, 4096, 6144, 14336, 28672, 151936)
    rows = (1, 2, 9, 17, 32, 33, 65, 128, 129, 256, 512, 4096)
    found = dict[Any, int]()
    kinds = itertools.product(rows, sizes, (32, 1000, 4096, 28672), (4, 8), (128, 32))
    for m, n, k, bits, group in kinds:
        config = weight_only_choice(H200, m, n, k, bits, 2, group).config
        found.setdefault((m > 8, m > 16, bits, group, config), m)
    kinds = {"few_rows_kernel": FewRowsConfig, "many_rows_kernel": ManyRowsConfig}
    for path in tables.OWN.glob("*.json"):
        for key, entry in tables.read(path)[1].items():
            if key.kernel in kinds:
                bits, _, _, group = key.kind.split()
                config: Any = kinds[key.kernel](**entry["config"])
                m = key.M
                found.setdefault((m > 8, m > 16, int(bits), int(group), config), m)
    return [(m, *key[2:]) for key, m in found.items()]


@pytest.mark.parametrize(("m", "bits", "group", "config"), _chosen(), ids=str)
def test_what_is_chosen_fits(m: int, bits: int, group: int, config: Any) -> None:
    facts = () if isinstance(config, FewRowsConfig) else (bits, group)
    assert config.refusal(*facts) is None


def test_configurations_that_do_not_fit() -> None:
    assert "4 warps takes 16" in str(FewRowsConfig(32, 1).refusal())
    assert "power of two" in str(FewRowsConfig(96, 1).refusal())
    assert "a step ahead" in str(FewRowsConfig(64, 1, 4, 1).refusal())
    assert "shared memory" in str(ManyRowsConfig(128, 256, 1, 8, 3).refusal(8, 128))
    packed, _ = _drawn(70, 256, 128, "middle", torch.bfloat16)
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit: num_stages is 1"):
        weight_only.few(x, packed, Extra(), FewRowsConfig(64, 1, 4, 1))


def test_shapes_and_the_operator() -> None:
    packed, _ = _drawn(70, 256, 128, "whole", torch.bfloat16)
    x = torch.randn(12, 256, generator=_generator()).bfloat16()
    z = weight_only_matmul(x, packed)
    assert torch.equal(weight_only_matmul(x.view(3, 4, 256), packed), z.view(3, 4, 70))
    assert weight_only_matmul(x[:0], packed).shape == (0, 70)
    assert torch.equal(weight_only_matmul(x.T.contiguous().T, packed), z)
    for extra in (Extra(), Extra(x[0, :70], z, "silu")):
        arguments = (x, *vars(packed).values(), *extra)
        torch.library.opcheck(torch.ops.lowbit.weight_only_matmul.default, arguments)


@pytest.mark.parametrize("activation", ["", "relu", "silu", "gelu"])
def test_what_follows_a_product(activation: str) -> None:
    packed, w = _drawn(70, 256, 128, "whole", torch.float32)
    made = _generator(2)
    x, bias, residual = (
        torch.randn(*shape, generator=made) for shape in ((5, 256), (70,), (5, 70))
    )
    follows = {"": lambda y: y, "relu": torch.relu, "silu": torch.nn.functional.silu,
               "gelu": torch.nn.functional.gelu}[activation]  # fmt: skip
    exact = follows(x.double() @ w.T + bias.double()) + residual.double()
    for context in (lowbit_lab.interpreter(), torch.no_grad()):
        with context:
            z = weight_only_matmul(x, packed, bias, activation=activation, residual=residual)
        torch.testing.assert_close(z.double(), exact, rtol=1e-5, atol=1e-5)


GATES = {
    "swiglu": torch.nn.functional.silu,
    "geglu": torch.nn.functional.gelu,
    "geglu_tanh": lambda a: torch.nn.functional.gelu(a, approximate="tanh"),
}


def _gated(n: int, k: int, group: int, kind: str, dtype: Any) -> tuple[TiledWeight, Any, Any]:
    """A packed weight whose rows are interleaved, and the two that it stands for."""
    packed, w = _drawn(2 * n, k, group, kind, dtype)
    return packed, *(w.view(-1, 2, 8, k)[:, half].flatten(0, 1) for half in range(2))


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (8, torch.float32)], ids=str)
def test_a_gated_unit(activation: str, bits: int, dtype: Any) -> None:
    """Bias before the gate, residual behind it; two weights that are put together row by row."""
    packed, gate, up = _gated(40, 256, 128, "whole" if bits == 4 else "int8", torch.float32)
    assert torch.equal(interleaved(gate, up), packed.dequantized())
    made = _generator(2)
    x, a_bias, b_bias, residual = (
        (torch.randn(*shape, generator=made) / 2).to(dtype)
        for shape in ((3, 5, 256), (40,), (40,), (3, 5, 40))
    )
    a, b = (x.double() @ w.T + bias.double() for w, bias in ((gate, a_bias), (up, b_bias)))
    exact = GATES[activation](a) * b + residual.double()
    bias = interleaved(a_bias, b_bias)
    for context in (lowbit_lab.interpreter(), torch.no_grad(), torch.enable_grad()):
        with context:
            z = weight_only_matmul(x, packed, bias, activation=activation, residual=residual)
        rounding = 2 * torch.finfo(dtype).eps + 1e-5
        torch.testing.assert_close(z.double(), exact, rtol=rounding, atol=rounding)
    assert weight_only_matmul(x[:0], packed, activation=activation).shape == (0, 5, 40)
    arguments = (x, *vars(packed).values(), bias, residual, activation)
    torch.library.opcheck(torch.ops.lowbit.weight_only_matmul.default, arguments)
    with pytest.raises(ValueError, match="multiple of 8"):
        interleaved(gate[:4], up[:4])
    short = _drawn(72, 256, 128, "middle", torch.float32)[0]
    with pytest.raises(ValueError, match="rows by 16; the weight has 72"):
        weight_only_matmul(x, short, activation=activation)


def test_the_gradients() -> None:
    packed, w = _drawn(70, 256, 64, "whole", torch.bfloat16)
    x = torch.randn(5, 256, generator=_generator()).bfloat16().requires_grad_()
    bias, residual = (torch.zeros(*shape, dtype=x.dtype, requires_grad=True)
                      for shape in ((70,), (5, 70)))  # fmt: skip
    dz = torch.randn(5, 70, generator=_generator(1)).bfloat16()
    z = weight_only_matmul(x, packed, bias, residual=residual)
    dx, db, dr = torch.autograd.grad(z, (x, bias, residual), dz)
    exact = dz.double() @ w
    assert ((dx.double() - exact).abs() <= 2.0**-6 * dz.double().abs() @ w.abs()).all()
    assert torch.equal(dr, dz)
    torch.testing.assert_close(db.double(), dz.double().sum(0), rtol=0.02, atol=0.02)


def test_errors_say_what_to_do() -> None:
    values, scale = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    packed = pack_int4(values, scale, group_size=32)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="last dimension must be 64"):
        weight_only_matmul(x[:, :63], packed)
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        weight_only_matmul(x.double(), packed)
    with pytest.raises(TypeError, match="pack_int4"):
        weight_only_matmul(x, values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give one of '', 'relu'"):
        weight_only_matmul(x, packed, activation="tanh")
    with pytest.raises(ValueError, match=r"must be \[4\]"):
        weight_only_matmul(x, packed, x[0])
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_int4(values, scale, group_size=24)
    with pytest.raises(ValueError, match=r"must be \[4, 2\]"):
        pack_int4(values, scale[:, :1], group_size=32)
    with pytest.raises(TypeError, match="int8"):
        pack_int8(values, scale, group_size=32)
    values[2, 5] = 16
    with pytest.raises(ValueError, match=r"weight\[2, 5\] is 16"):
        pack_int4(values, scale, group_size=32)


POINTERS = {"tiles_ptr": "*i16", "words_ptr": "*i32", "part_ptr": "*fp32", "met_ptr": "*i32",
            "ends_ptr": "*i32", "rows_ptr": "*i32", "M": "i32:1", "N": "i32", "K": "i32",
            "padded": "i32", "experts": "i32", "EXPERTS": 0}  # fmt: skip


def _kinds(planes: int, group: int, half: bool, gated: bool = False, **more: Any) -> dict[str, Any]:
    kind = "*fp16" if half else "*bf16"
    return {
        **POINTERS, "z_ptr": kind, "bias_ptr": kind, "residual_ptr": kind, "PLANES": planes,
        "GROUP": group, "REAL": False, "HALF": half, "BIAS": True, "RESIDUAL": True,
        "ACTIVATION": "silu", "GATED": gated, **more,
    }  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("planes", "group", "half"), [(1, 128, False), (2, 32, True)])
def test_ahead_of_time_few_rows(sm: int, planes: int, group: int, half: bool, gated: bool) -> None:
    """A gate costs no exchange between threads."""
    kind = "*fp16" if half else "*bf16"
    made = compile_ahead(
        few_rows.few_rows_kernel,
        _kinds(planes, group, half, gated, x_ptr=kind, x_stride="i32", BLOCK_N=64, BLOCK_M=8,
               STAGES=3, SPLITS=4, GATHERED=False),
        sm, num_warps=4,
    )  # fmt: skip
    assert made.local == 0
    assert made.count("HMMA") >= 8
    # Bits only, no conversion of single integers; and whole 16 bytes of tiles and of x.
    assert made.count("I2F") + made.count("I2FP") == 0
    assert made.count("LDGSTS.E.BYPASS.128") + made.count("LDGSTS.E.BYPASS.LTC128B.128") > 0
    assert made.count("SHFL") == 0


@pytest.mark.deep
@pytest.mark.parametrize(("planes", "group", "half", "gated"), [
    (1, 128, False, False), (1, 32, True, False), (1, 128, False, True),
])  # fmt: skip
def test_ahead_of_time_many_rows(planes: int, group: int, half: bool, gated: bool) -> None:
    from triton.experimental.gluon import language

    gl: Any = language

    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    kind = "fp16" if half else "bf16"
    made = compile_ahead(
        many_rows.many_rows_kernel,
        _kinds(planes, group, half, gated, x_desc=f"tensordesc<{kind}[128,64],{layout!r}>",
               blocks="i32", BLOCK_N=128, BLOCK_M=128, STAGES=2, SPLITS=1, RESIDUAL=False),
        90, num_warps=4,
    )  # fmt: skip
    assert made.local == 0
    assert made.count("HGMMA") >= 16
    assert made.count("I2F") + made.count("I2FP") <= 4  # divisions of numbers of tiles
    assert made.count("UTMALDG") >= 2


@pytest.mark.deep
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("planes", [1, 2])
def test_ahead_of_time_dequantized(sm: int, planes: int) -> None:
    made = compile_ahead(
        dequantize.dequantize_kernel,
        {"tiles_ptr": "*i16", "scale_ptr": "*bf16", "zero_ptr": "*bf16", "w_ptr": "*bf16",
         "N": "i32", "K": "i32", "first": "i32", "GROUP": 128, "ZERO": True, "PLANES": planes,
         "MIDDLE": 8},
        sm,
    )  # fmt: skip
    assert made.local == 0
    assert made.wide_loads > 0


def _moved(packed: TiledWeight) -> TiledWeight:
    given = vars(packed).values()
    return TiledWeight(*(one.cuda() if isinstance(one, torch.Tensor) else one for one in given))


@pytest.mark.deep
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(("m", "bits", "group", "config"), _chosen(), ids=str)
def test_every_configuration_on_a_gpu(m: int, bits: int, group: int, config: Any) -> None:
    """Twice, for the counters of what is cut along K must be zeros again."""
    kind = "int8" if bits == 8 else "whole"
    packed, w = _drawn(1000, 4096, group, kind, torch.bfloat16)
    x = torch.randn(m, 4096, generator=_generator(1)).bfloat16()
    exact = x.double() @ w.T
    few = isinstance(config, FewRowsConfig)
    run = KERNELS["few_rows_kernel" if few else "many_rows_kernel"].run
    for _ in range(2):
        z = run(x.cuda(), _moved(packed), Extra(), config).cpu()
        assert ((z.double() - exact).abs() <= _budget(x, w, kind, exact)).all()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(("kind", "activation"), [
    *((kind, "swiglu") for kind in KINDS), ("whole", "geglu"), ("whole", "geglu_tanh"),
])  # fmt: skip
@pytest.mark.parametrize("m", [1, 32, 33, 1000])
@pytest.mark.parametrize(("n", "k", "group"), [(40, 264, 32), (3000, 4096, 128)])
def test_a_gated_unit_on_a_gpu(
    m: int, n: int, k: int, group: int, kind: str, activation: str
) -> None:
    packed, gate, up = _gated(n, k, group, kind, torch.bfloat16)
    x = (torch.randn(m, k, generator=_generator(1)) * 10 / k**0.5).bfloat16().cuda()
    gate, up = gate.cuda(), up.cuda()
    z = weight_only_matmul(x, _moved(packed), activation=activation).double()
    a, b = x.double() @ gate.T, x.double() @ up.T
    exact = GATES[activation](a) * b
    off_a, off_b = _budget(x, gate, kind, a), _budget(x, up, kind, b)
    budget = 1.2 * off_a * b.abs() + (a.abs() + 1.2 * off_a) * off_b + 2.0**-8 * exact.abs()
    assert ((z - exact).abs() <= budget).all()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES, (70, 66, 136, 128), (300, 1000, 4100, 64)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(case: tuple[int, int, int, int], kind: str, dtype: Any) -> None:
    m, n, k, group = case
    packed, w = _drawn(n, k, group, kind, dtype)
    made = _generator(1)
    x, bias = ((torch.randn(*shape, generator=made) * 3).to(dtype) for shape in ((m, k), (n,)))
    exact = torch.relu(x.double() @ w.T + bias.double())
    z = weight_only_matmul(x.cuda(), _moved(packed), bias.cuda(), activation="relu").cpu()
    assert ((z.double() - exact).abs() <= _budget(x, w, kind, exact)).all()
    odd = x.clone()
    odd[m // 2, k // 2] = float("inf")
    z = weight_only_matmul(odd.cuda(), _moved(packed)).cpu()
    assert (~z[m // 2].isfinite()).all()
    rest = torch.arange(m) != m // 2
    assert z[rest].isfinite().all()
