"""Mixtures of experts on the GPU: rows by expert and sums of what experts made, in the interpreter;
products with the experts' weights: the choice, the machine code, and on a GPU every distribution of
rows, against the meaning that the networks for CPUs have."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from lowbit.graph.graph import Node  # noqa: E402
from lowbit.graph.operator import operators  # noqa: E402
from lowbit.kernels.triton.ahead import compile_ahead  # noqa: E402
from lowbit.kernels.triton.fast import few_rows, grouped, many_rows, routing  # noqa: E402
from lowbit.kernels.triton.fast.few_rows import FewRowsConfig  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402
from lowbit.kernels.triton.fast.tiles import GATES, Extra, TiledWeight, finished  # noqa: E402
from lowbit.torch.functional import (  # noqa: E402
    grouped_matmul,
    pack_int4,
    pack_int8,
    route,
    routed_sum,
    top_experts,
    weight_only_matmul,
)
from lowbit_lab import interpreter  # noqa: E402

GPU = torch.cuda.is_available()
H200 = Gpu(90, 132)


def _generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def _chosen(rows: int, each: int, count: int, kind: str) -> Any:
    """Different experts for each row: of all, of the first `each` alone, or no odd ones."""
    among = {"all": count, "first": each, "even": count}[kind]
    drawn = torch.rand(rows, among, generator=_generator(3))
    if kind == "even":
        drawn[:, 1::2] = -1
        each = min(each, (count + 1) // 2)
    return drawn.topk(each).indices


def _packed(
    shape: tuple[int, int, int], group: int, bits: int, dtype: Any
) -> tuple[TiledWeight, Any]:
    """Experts' weights [experts, N, K], and what they stand for in float64."""
    made, k = _generator(), shape[2]
    at, groups = torch.arange(k) // group, -(-k // group)
    scale = (torch.rand(*shape[:2], groups, generator=made) * 0.02 + 0.001).to(dtype)
    wide = scale.double()[..., at]
    if bits == 8:
        values = torch.randint(-128, 128, shape, generator=made, dtype=torch.int8)
        return pack_int8(values, scale, group_size=group), values.double() * wide
    values = torch.randint(0, 16, shape, generator=made, dtype=torch.uint8)
    zero = torch.randint(0, 16, scale.shape, generator=made)
    centred = values.double() - zero.double()[..., at]
    return pack_int4(values, scale, zero, group_size=group), centred * wide


def _moved(packed: TiledWeight, device: str) -> TiledWeight:
    held = vars(packed).values()
    return TiledWeight(*(one.to(device) if isinstance(one, torch.Tensor) else one for one in held))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("rows", "count", "top"), [(1, 8, 2), (5, 60, 4), (40, 128, 8), (0, 4, 2)])
def test_the_best_experts(rows: int, count: int, top: int, normalized: bool) -> None:
    scores = torch.randn(rows, count + 3, generator=_generator())[:, 3:]
    for device in ("cpu", "cuda") if GPU else ("cpu",):
        for context in (interpreter(), torch.no_grad()):
            with context:
                shares, experts = top_experts(scores.to(device), top, normalized=normalized)
            exact = (scores.double()).softmax(1)
            want, best = exact.topk(top)
            want = want / want.sum(1, keepdim=True) if normalized else want
            assert torch.equal(experts.cpu(), best)
            torch.testing.assert_close(shares.cpu().double(), want, rtol=1e-5, atol=1e-7)


def test_no_expert_is_chosen_twice() -> None:
    """Not even among infinities and NaN: each row has as many places as it needs."""
    scores = torch.full((4, 5), float("nan"))
    scores[1], scores[2], scores[3, 2] = float("-inf"), 1.0, 3.0
    for context in (interpreter(), torch.no_grad()):
        with context:
            _, experts = top_experts(scores, 3, normalized=True)
        assert (experts.sort().values.diff() > 0).all()
    with pytest.raises(ValueError, match="no 6 experts"):
        top_experts(scores, 6, normalized=True)


ROUTES = [(1, 2, 8), (3, 2, 5), (33, 1, 1), (40, 8, 128), (700, 8, 16), (0, 2, 4)]


@pytest.mark.parametrize("sizes", ROUTES, ids=str)
@pytest.mark.parametrize("kind", ["all", "first", "even"])
def test_rows_by_expert(sizes: tuple[int, int, int], kind: str) -> None:
    """As the networks for CPUs sort them, by the kernel and by PyTorch."""
    chosen, count = _chosen(*sizes, kind), sizes[2]
    node = Node("Route", ("experts",), ("rows", "places", "ends"), {"count": count})
    want = operators.get("Route").meaning(node, chosen.numpy())
    for context in (interpreter(), torch.no_grad()):
        with context:
            made = route(chosen, count)
        for one, other in zip(made, want, strict=True):
            assert one.dtype == torch.int32
            assert np.array_equal(one.numpy(), other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "each", "width"), [(3, 2, 40), (1, 8, 2100), (0, 2, 16)])
def test_sums_of_experts(rows: int, each: int, width: int, added: bool, dtype: Any) -> None:
    made = _generator()
    x = torch.randn(rows * each, width + 8, generator=made).to(dtype)[:, 8:]
    shares = torch.rand(rows, each, generator=made)
    residual = torch.randn(rows, width, generator=made).to(dtype) if added else None
    places = torch.randperm(rows * each, generator=made).int().view(rows, each)
    node = Node("RoutedSum", ("x", "places", "shares", "residual"), ("z",), {})
    base = torch.zeros(rows, width) if residual is None else residual
    arrays = (one.double().numpy() for one in (x, shares, base))
    x64, shares64, base64 = arrays
    want = operators.get("RoutedSum").meaning(node, x64, places.numpy(), shares64, base64)
    for context in (interpreter(), torch.no_grad()):
        with context:
            z = routed_sum(x, places, shares, residual)
        assert z.dtype == dtype
        unit = torch.finfo(dtype).eps
        assert (np.abs(z.double().numpy() - want) <= unit * (np.abs(want) + 4)).all()


def _compared(
    sizes: tuple[int, int, int], shape: tuple[int, int], kind: str, group: int, bits: int,
    dtype: Any, activation: str, device: str, gathered: bool,
) -> None:  # fmt: skip
    """A product of x's rows, one for each pair if they are not gathered, with an odd stride."""
    (rows, each, count), (n, k) = sizes, shape
    chosen = _chosen(rows, each, count, kind).to(device)
    packed, w = _packed((count, n, k), group, bits, torch.bfloat16)
    of_pairs, _, ends = route(chosen, count)
    x = torch.randn(rows if gathered else chosen.numel(), k + 3, generator=_generator(1)) * 4
    x, w = x.to(dtype)[:, 3:].to(device), w.to(device)
    moved = _moved(packed, device)
    z = grouped_matmul(x, moved, ends, of_pairs if gathered else None, activation=activation)
    source = x.double()[of_pairs] if gathered else x.double()
    experts = chosen.flatten().sort(stable=True).values
    assert z.dtype == dtype
    assert z.shape == (len(experts), n // 2 if activation in GATES else n)
    for expert in range(count):
        own = experts == expert
        exact, mass = source[own] @ w[expert].T, source[own].abs() @ w[expert].abs().T
        off = torch.finfo(dtype).eps * exact.abs() + (2.0**-22 * k**0.5) * mass + 1e-6
        off = off + 2 * torch.finfo(dtype).eps * mass
        extra = Extra(activation=activation)
        if activation:  # whose slope is below 1.2, or, of a gate, the other factor
            a, b = exact.unflatten(1, (-1, 2, 8)).unbind(2)
            off_a, off_b = off.unflatten(1, (-1, 2, 8)).unbind(2)
            off = 1.2 * off_a * b.abs() + (a.abs() + 1.2 * off_a) * off_b
            off = off.flatten(1) + 2.0**-7 * finished(exact, extra).abs()
        assert ((z[own].double() - finished(exact, extra)).abs() <= off).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation", ["", "swiglu"])
@pytest.mark.parametrize("gathered", [False, True])
def test_products_with_experts(bits: int, activation: str, gathered: bool) -> None:
    for context in (interpreter(), torch.no_grad()):
        with context:
            _compared(
                (5, 2, 4), (80, 264), "even", 64, bits, torch.float32, activation, "cpu", gathered
            )


def test_products_of_floats() -> None:
    """Without a packing: [experts, N, K]."""
    w, x = (torch.randn(*shape, generator=_generator()) for shape in ((4, 24, 32), (5, 32)))
    chosen = _chosen(5, 2, 4, "all")
    rows, _, ends = route(chosen, 4)
    pairs = zip(chosen.flatten().sort().values, rows, strict=True)
    exact = torch.stack([w[expert] @ x[row] for expert, row in pairs])
    torch.testing.assert_close(grouped_matmul(x, w, ends, rows), exact)


def test_one_matrix_is_not_several() -> None:
    packed, w = _packed((3, 80, 256), 128, 4, torch.bfloat16)
    assert packed.experts == 3
    torch.testing.assert_close(packed.expert(1).dequantized(), w[1])
    x = torch.ones(2, 256)
    assert torch.equal(weight_only_matmul(x, packed.expert(2)), (x.double() @ w[2].T).float())
    with pytest.raises(ValueError, match="3 experts; call grouped_matmul"):
        weight_only_matmul(x, packed)
    with pytest.raises(ValueError, match=r"must be \[3\]"):
        grouped_matmul(x, packed, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="int32"):
        grouped_matmul(x, packed, torch.zeros(3))


@pytest.mark.deep
def test_operators_keep_their_promises() -> None:
    ops = torch.ops.lowbit
    chosen = _chosen(5, 2, 4, "all")
    rows, places, ends = route(chosen, 4)
    packed, _ = _packed((4, 32, 128), 128, 4, torch.bfloat16)
    x = torch.randn(5, 128, generator=_generator()).bfloat16()
    torch.library.opcheck(ops.top_experts.default, (torch.rand(5, 4), 2, True))
    torch.library.opcheck(ops.route.default, (chosen, 4))
    for activation in ("", "swiglu"):
        parts = (x, *vars(packed).values(), ends, rows, activation)
        torch.library.opcheck(ops.grouped_matmul.default, parts)
    z = grouped_matmul(x, packed, ends, rows)
    for residual in (None, z[:5]):
        shares = torch.rand(5, 2, generator=_generator())
        torch.library.opcheck(ops.routed_sum.default, (z, places, shares, residual))


@pytest.mark.parametrize(("gpu", "M", "itemsize", "kernel", "columns"), [
    (H200, 2, 2, "few_rows_kernel", 8), (H200, 8 * 16, 2, "few_rows_kernel", 16),
    (H200, 8 * 100, 2, "many_rows_kernel", None),
    (H200, 2, 4, "dequantize_kernel and cuBLAS", None),
    (Gpu(80, 108), 8 * 100, 2, "few_rows_kernel", 32),
])  # fmt: skip
def test_which_kernel_serves(
    gpu: Gpu, M: int, itemsize: int, kernel: str, columns: int | None
) -> None:
    choice = grouped.grouped_choice(gpu, M, 14336, 4096, 8, 4, itemsize)
    assert choice.kernel == kernel
    if columns:
        assert choice.config[1] == columns


def test_what_is_chosen_fits() -> None:
    sizes = itertools.product((1, 8, 128), (1, 9, 200, 4096, 40000), (64, 1536, 28672),
                              (256, 2048, 14336), (4, 8), (32, 128))  # fmt: skip
    for experts, m, n, k, bits, group in sizes:
        config = grouped.grouped_choice(H200, m, n, k, experts, bits, 2, group).config
        few = isinstance(config, tuple)
        assert (config[0].refusal() if few else config.refusal(bits, group)) is None


def _sorted_kinds(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    kinds = {"tiles_ptr": "*i16", "words_ptr": "*i32", "part_ptr": "*fp32", "met_ptr": "*i32",
             "ends_ptr": "*i32", "rows_ptr": "*i32", "places_ptr": "*i32", "shares_ptr": "*fp32",
             "experts_ptr": "*i64", "scores_ptr": "*fp32", "M": "i32:1",
             "PLANES": 1, "GROUP": 128, "REAL": False,
             "HALF": False, "BIAS": False, "RESIDUAL": False, "SPLITS": 1} | given  # fmt: skip
    return {
        name: kinds.get(name, "*bf16" if "_ptr" in name else "i32") for name in kernel.arg_names
    }


@pytest.mark.deep
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("experts", "splits"), [(32, 2), (128, 1)])
def test_ahead_of_time_few_rows(sm: int, experts: int, splits: int) -> None:
    """Each warp finds its expert by itself: no barrier more than the product has."""
    barriers = []
    for count in (0, experts):
        given = {"ACTIVATION": "silu", "GATED": True, "BLOCK_N": 64, "BLOCK_M": 8, "STAGES": 3,
                 "SPLITS": splits, "EXPERTS": count, "GATHERED": count > 0}  # fmt: skip
        kernel = few_rows.few_rows_kernel
        made = compile_ahead(kernel, _sorted_kinds(kernel, given), sm, num_warps=4)
        assert made.local == 0
        assert made.count("HMMA") >= 8
        barriers.append(made.count("BAR"))
    assert barriers[0] >= barriers[1]


@pytest.mark.deep
@pytest.mark.parametrize("experts", [32, 128])
def test_ahead_of_time_many_rows(experts: int) -> None:
    from triton.experimental.gluon import language

    gl: Any = language
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    given = {"x_desc": f"tensordesc<bf16[128,64],{layout!r}>", "ACTIVATION": "silu",
             "GATED": True, "BLOCK_N": 128, "BLOCK_M": 128, "STAGES": 2,
             "EXPERTS": experts}  # fmt: skip
    kernel = many_rows.many_rows_kernel
    made = compile_ahead(kernel, _sorted_kinds(kernel, given), 90, num_warps=4)
    assert made.local == 0
    assert made.count("HGMMA") >= 16
    assert made.count("UTMALDG") >= 2


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("name", "given"), [
    ("route_kernel", {"BLOCK": 4096}), ("route_kernel", {"BLOCK": 32}),
    ("top_experts_kernel", {"TOP": 8, "BLOCK": 128, "NORMALIZED": True}),
    ("routed_sum_kernel", {"ADDED": True, "BLOCK": 1024}),
])  # fmt: skip
def test_ahead_of_time_routing(name: str, given: dict[str, Any], sm: int) -> None:
    kernel = getattr(routing, name)
    warps = {4096: 8, 128: 1}.get(given["BLOCK"], 4)
    made = compile_ahead(kernel, _sorted_kinds(kernel, given), sm, num_warps=warps)
    assert made.local == 0
    assert made.wide_loads > 0 or given["BLOCK"] <= 128


ON_GPU = [
    ((1, 2, 8), (96, 264)), ((3, 2, 5), (1536, 2048)), ((33, 8, 128), (768, 512)),
    ((200, 2, 3), (208, 520)), ((1000, 8, 16), (1536, 2048)), ((0, 2, 4), (64, 128)),
]  # fmt: skip


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("case", ON_GPU, ids=str)
@pytest.mark.parametrize("kind", ["all", "first", "even"])
@pytest.mark.parametrize(("bits", "group", "dtype", "activation"), [
    (4, 128, torch.bfloat16, "swiglu"), (4, 32, torch.float16, ""), (8, 128, torch.bfloat16, ""),
    (4, 128, torch.float32, "swiglu"),
], ids=str)  # fmt: skip
def test_products_on_a_gpu(case: Any, kind: str, bits: int, group: int, dtype: Any,
                           activation: str) -> None:  # fmt: skip
    for gathered in (False, True):
        how: Any = kind, group, bits, dtype, activation, "cuda", gathered
        _compared(*case, *how)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("sizes", [*ROUTES, (4096, 8, 128)], ids=str)
@pytest.mark.parametrize("kind", ["all", "first", "even"])
def test_routes_and_sums_on_a_gpu(sizes: tuple[int, int, int], kind: str) -> None:
    chosen, count = _chosen(*sizes, kind), sizes[2]
    want = route(chosen, count)
    for one, other in zip(route(chosen.cuda(), count), want, strict=True):
        assert torch.equal(one.cpu(), other)
    x = torch.randn(chosen.numel(), 2100, generator=_generator()).bfloat16()
    shares = torch.rand(*chosen.shape, generator=_generator())
    z = routed_sum(x.cuda(), want[1].cuda(), shares.cuda(), x[: len(chosen)].cuda())
    exact = routed_sum(x.double(), want[1], shares, x[: len(chosen)].double())
    assert ((z.cpu().double() - exact).abs() <= 2.0**-8 * (exact.abs() + 1)).all()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 300])
def test_in_a_graph_on_a_gpu(rows: int) -> None:
    """Recorded for one choice of experts, replayed for others."""
    packed, _ = _packed((16, 256, 512), 128, 4, torch.bfloat16)
    weight = _moved(packed, "cuda")
    x = torch.randn(rows, 512, generator=_generator()).bfloat16().cuda()

    def made(chosen: Any) -> Any:
        pairs, places, ends = route(chosen, 16)
        z = grouped_matmul(x, weight, ends, pairs, activation="swiglu")
        return routed_sum(z, places, torch.ones(rows, 4, device="cuda"))

    held = _chosen(rows, 4, 16, "first").cuda()
    made(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = made(held)
    for kind in ("all", "even", "first"):
        held.copy_(_chosen(rows, 4, 16, kind))
        graph.replay()
        assert torch.equal(z, made(held))


def test_configurations_of_few_rows_are_records() -> None:
    config, columns = grouped.grouped_choice(H200, 16, 1536, 2048, 128).config
    assert isinstance(config, FewRowsConfig)
    assert columns == 8
