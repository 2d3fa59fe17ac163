"""Softmax, sum, LayerNorm and RMSNorm: the kernels in the interpreter, every access checked,
against float64; their gradients; and what their operators promise PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from lowbit.kernels.triton.fast import launch, norm, row_sum, rows, softmax  # noqa: E402
from lowbit.kernels.triton.fast.rows import RowConfig  # noqa: E402
from lowbit.torch import functional  # noqa: E402
from lowbit_lab import interpreter  # noqa: E402
from lowbit_lab.backends.host import run_checked  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 37), (2, 5, 16), (7, 129), (1, 1000), (0, 5), (5, 263)]

# Of a result: half a unit in the last place; a whole one for bfloat16, which Triton's interpreter
# cuts off where a GPU rounds.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
UNIT = 2.0**-24


def data(shape: tuple[int, ...], dtype: Any = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (3 * made).to(dtype)


def interpreted(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with interpreter():
        return function(*arguments)


def assert_close(got: Tensor, expected: Tensor, sums: Tensor | float, length: int) -> None:
    """Within length + 16 float32 roundings of `sums`, the largest that a sum can be on the way,
    and one rounding of the result."""
    budget = (length + 16) * UNIT * sums + ROUNDING[got.dtype] * expected.abs() + 2.0**-126
    if got.dtype is torch.float16:
        budget = budget + 2.0**-25  # half of its smallest number
    assert got.shape == expected.shape
    assert got.is_contiguous()
    assert ((got.double() - expected).abs() <= budget).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape: tuple[int, ...], dtype: Any) -> None:
    x = data(shape, dtype)
    expected = torch.softmax(x.double(), -1)
    # The argument of exp is off by one rounding of its size, which is a factor of the result.
    assert_close(interpreted(functional.softmax, x), expected, 30 * expected, shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_sum(shape: tuple[int, ...], dtype: Any) -> None:
    x = data(shape, dtype)
    wide = x.double()
    assert_close(interpreted(functional.sum, x), wide.sum(-1), wide.abs().sum(-1), shape[-1])


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 40, 131])
def test_row_sum_in_parts(length: int, parts: int) -> None:
    x = data((3, length))
    with interpreter():
        got = row_sum.row_sum(x, row_sum.SumConfig(2, 32, parts, 4))
    assert_close(got, x.double().sum(-1), x.double().abs().sum(-1), length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape: tuple[int, ...], affine: int, dtype: Any) -> None:
    x = data(shape, dtype) + 1
    weight, bias = (data(shape[-1:], dtype, seed) if affine >= seed else None for seed in (1, 2))
    got = interpreted(functional.layer_norm, x, weight, bias, 1e-3)
    args = [None if one is None else one.double() for one in (weight, bias)]
    expected = torch.nn.functional.layer_norm(x.double(), shape[-1:], *args, 1e-3)
    # What is off is the mean, by a share of x, which the division by the deviation enlarges.
    scale = (x.double().abs().amax(-1, keepdim=True) + 1) * 1e-3**-0.5
    scale = scale * (1 if weight is None else weight.double().abs()) + expected.abs() + 3
    assert_close(got, expected, scale, shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_written_anew(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that begin anywhere, and are many: the same bits."""
    x, weight, bias = data((9, 263), dtype), data((263,), dtype, 1), data((263,), dtype, 2)
    with interpreter():
        plain = functional.layer_norm(x, weight, bias)
        monkeypatch.setattr(norm, "_MANY", 1)
        assert torch.equal(functional.layer_norm(x, weight, bias), plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...], weighted: bool, dtype: Any) -> None:
    x, weight = data(shape, dtype), data(shape[-1:], dtype, 1) if weighted else None
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = expected * (1 if weight is None else weight.double())
    got = interpreted(functional.rms_norm, x, weight)
    assert_close(got, expected, expected.abs(), shape[-1])


@pytest.mark.parametrize(
    "function", [functional.softmax, functional.sum, functional.layer_norm, functional.rms_norm]
)
def test_rows_of_any_strides(function: Callable[[Tensor], Tensor]) -> None:
    whole = data((6, 4, 50))
    for x in (whole[1::2, :, 3:40], whole.transpose(0, 2), whole[:, :1].expand(6, 3, 50)):
        got = interpreted(function, x)
        torch.testing.assert_close(got, interpreted(function, x.contiguous()), atol=0, rtol=0)


def test_rows_that_softmax_should_survive() -> None:
    inf = float("inf")
    x = torch.tensor(
        [[1e30, -1e30, 0.0], [-inf, 0.0, 0.0], [-inf] * 3, [inf, 0, 0], [float("nan"), 0, 0]]
    )
    got = interpreted(functional.softmax, x)
    torch.testing.assert_close(got, torch.softmax(x, -1), equal_nan=True)


def test_variance_of_a_large_mean() -> None:
    x = data((2, 300)) + 1e4
    expected = torch.nn.functional.layer_norm(x.double(), (300,))
    got = interpreted(functional.layer_norm, x)
    assert_close(got, expected, 1e4, 1)  # the mean is rounded once; squares of 1e8 would show


def in_two_runs(kernel: Any, grid: Any, arguments: Mapping[str, Any]) -> None:
    """Programs that wait for each other cannot run one after the other. With words from the start
    none waits: a first run writes what parts tell each other, a second reads it."""
    words = arguments["words_ptr"]
    assert arguments["PARTS"] > 1
    assert not words.any()
    words.fill_(1)
    for _ in range(2):
        words[-1] = 0
        run_checked(kernel, grid, arguments)
        # Programs are numbered by a counter, in the order in which they start.
        assert words[-1] == grid[0]


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "pieces"), [(33, 1), (33, 4), (64, 4), (130, 1)])
def test_rows_in_parts(
    length: int, pieces: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "gpu_of", lambda device: launch.Gpu(0, 132))
    x, dz = data((5, length), dtype), data((5, length), dtype, seed=1)
    weight, bias = data((length,), dtype, seed=2), data((length,), dtype, seed=4)
    inf = float("inf")
    x[1, :32] = -inf  # parts of -inf alone
    x[2] = x[1] - 200  # whose base, 0, is above that of the row
    x[3] = -inf
    y = data((5, length), dtype, seed=3) + 2
    config, whole = RowConfig(1, 16, 4, pieces), RowConfig(1, 256, 4, pieces)

    def everything(config: RowConfig) -> list[Tensor]:
        z = softmax.softmax(x, config)
        dx = softmax.softmax_backward(z, dz, config)
        found = [z, dx]
        for centred, added in ((True, bias), (False, None)):
            n, mean, rstd = norm.norm(y, weight, added, 1e-5, centred, config)
            dn = norm.norm_backward(dz, y, weight, mean, rstd, centred, config)
            found += [n, mean, rstd, dn]
        return found

    with launch.running(in_two_runs):
        found = everything(config)
    with interpreter():
        expected = everything(whole)
    assert found[0][3].isnan().all()
    # A NaN is one in both; else the order of float32 sums is all that differs.
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(found[0], torch.softmax(x, -1), equal_nan=True)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "softmax": (functional.softmax, 0),
    "sum": (functional.sum, 0),
    "layer_norm": (functional.layer_norm, 2),
    "rms_norm": (functional.rms_norm, 1),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.parametrize("shape", [(3, 37), (2, 3, 16), (40, 130)])
def test_gradients(shape: tuple[int, ...], name: str) -> None:
    """All gradients, with those of float64 autograd through plain PyTorch."""
    function, extra = FUNCTIONS[name]
    plain: dict[str, Callable[..., Tensor]] = {
        "softmax": lambda x: torch.softmax(x, -1),
        "sum": lambda x: x.sum(-1),
        "layer_norm": lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b),
        "rms_norm": lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
    }
    given = [data(shape), *(data(shape[-1:], seed=1 + i) for i in range(extra))]
    leaves = [one.clone().requires_grad_() for one in given]
    wide = [one.double().requires_grad_() for one in given]
    expected = plain[name](*wide)
    dz = data(tuple(expected.shape), seed=9)
    expected.backward(dz.double())
    with interpreter():
        function(*leaves).backward(dz)
    for got, right in zip(leaves, wide, strict=True):
        assert got.grad is not None
        assert right.grad is not None
        # Each is a sum over rows or along one, of terms that are at most the largest product.
        terms = given[0].numel()
        scale = (1 + dz.abs().max().double()) * (1 + given[0].abs().max())
        budget = (terms + 32) * UNIT * scale
        assert ((got.grad.double() - right.grad).abs() <= budget).all()


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_pass_opcheck(dtype: Any) -> None:
    ops = torch.ops.lowbit
    x, w = data((3, 20), dtype).requires_grad_(), data((20,), dtype, 1).requires_grad_()
    torch.library.opcheck(ops.softmax.default, (x,))
    torch.library.opcheck(ops.sum.default, (x,))
    torch.library.opcheck(ops.norm.default, (x, w, w.detach() + 1, 1e-5, True))
    torch.library.opcheck(ops.norm.default, (x, None, None, 1e-5, True))
    torch.library.opcheck(ops.norm.default, (x, w, None, 1e-5, False))
    kept = torch.ones(3)
    plain, weight = x.detach(), w.detach()
    torch.library.opcheck(ops.softmax_backward.default, (plain, plain))
    torch.library.opcheck(ops.norm_backward.default, (plain, plain, weight, kept, kept, True))
    torch.library.opcheck(
        ops.norm_weight_backward.default, (plain, plain, kept, kept, dtype, False)
    )


def test_compiled_whole() -> None:
    def both(x: Tensor, w: Tensor) -> Tensor:
        return functional.softmax(functional.rms_norm(x, w)) + functional.sum(x)[:, None]

    x, w = data((3, 20)), data((20,), seed=1)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), both(x, w))


def test_bad_arguments_are_told() -> None:
    x = data((2, 3))
    with pytest.raises(TypeError, match=r"softmax: x is a list; give a torch\.Tensor"):
        functional.softmax([1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="x is int64; give float32, bfloat16 or float16"):
        functional.sum(x.long())
    with pytest.raises(ValueError, match=r"shape \[2, 0\]; it must be \[\.\.\., length\]"):
        functional.softmax(x[:, :0])
    with pytest.raises(ValueError, match=r"weight has the shape \[2\]; it must be \[3\]"):
        functional.rms_norm(x, torch.ones(2))
    with pytest.raises(TypeError, match=r"x is torch\.float32 and weight torch\.float16"):
        functional.rms_norm(x, torch.ones(3).half())
    with pytest.raises(ValueError, match="there is a bias and no weight"):
        functional.layer_norm(x, None, torch.ones(3))
    with pytest.raises(ValueError, match="eps is -1; it must be 0 or more"):
        functional.layer_norm(x, eps=-1)
    with pytest.raises(ValueError, match="softmax: x is on meta; move it"):
        functional.softmax(x.to("meta"))


def test_configurations_that_do_not_fit_are_refused() -> None:
    assert RowConfig(1, 16384, 16).refusal(131072, 132) is None
    assert "power of two" in str(RowConfig(1, 100, 4).refusal(100, 132))
    assert "512 elements" in str(RowConfig(1, 16384, 1).refusal(16384, 132))
    assert "cannot share" in str(RowConfig(2, 16, 4).refusal(17, 132))
    assert "133 parts" in str(RowConfig(1, 16, 4).refusal(16 * 132 + 1, 132))
    assert "pieces is 3; it must be a power of two" in str(RowConfig(1, 16, 4, 3).refusal(16, 132))
    assert "cannot be cut into 32 pieces" in str(RowConfig(1, 16, 4, 32).refusal(16, 132))
    with pytest.raises(ValueError, match="does not fit: a row of 8 would have 2 parts"):
        softmax.softmax(data((2, 8)), RowConfig(1, 4, 4))
    with pytest.raises(ValueError, match="parts is 0; it must be 1 or more"):
        row_sum.row_sum(data((2, 5)), row_sum.SumConfig(1, 4, 0, 4))


H200 = launch.Gpu(90, 132)


@pytest.mark.parametrize("largest", [4096, 16384])
def test_the_rule_serves_every_length(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGEST_CHUNK", largest)
    for length in (1, 2, 511, 512, 1025, 4097, 16385, 131072):
        config = rows.row_choice("kernel", {}, H200, length, 4).config
        assert config.refusal(length, 132) is None
        assert config.parts(length) * config.chunk >= length
    with pytest.raises(ValueError, match=f"too long for this GPU.*the limit is {132 * largest}"):
        rows.row_choice("kernel", {}, H200, 132 * largest + 1, 4)


def test_tables_are_by_gpu_and_bytes_of_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    monkeypatch.setattr(
        rows, "launch", lambda _, *given, **options: started.append((*given, options))
    )
    monkeypatch.setattr(rows, "gpu_of", lambda device: H200)
    two, four = RowConfig(1, 256, 4, 2, maxnreg=64), RowConfig(1, 128, 4)
    table: rows.RowTable = {(90, 2): ((300, two),), (90, 4): ((300, four),)}
    for dtype, config in ((torch.float32, four), (torch.bfloat16, two), (torch.float16, two)):
        x = torch.empty(5, 300, dtype=dtype)
        found = rows.row_choice("kernel", table, H200, 300, x.element_size())
        assert (found.config, found.refused) == (config, ())
        other = rows.row_choice("kernel", table, H200, 301, x.element_size())
        assert other.config not in (two, four)
        assert other.refused == ((str(config), "the table has it for rows of up to 300"),)
        assert rows.row_choice("kernel", table, launch.Gpu(80, 108), 300, 4).refused == ()
        rows.launch_rows("kernel", rows.row_choice, config, {}, x=x)  # type: ignore[arg-type]
        grid, arguments, options = started.pop()
        assert arguments["HELD"] is (config is two)
        assert options.get("maxnreg") == config.maxnreg
        assert options["num_warps"] == 4
        assert grid == (5 * config.parts(300),)


def test_kernels_alone_need_a_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"move them with .cuda\(\), or run it in the interp"):
        softmax.softmax(data((2, 5)))


def test_interpreter_sees_accesses_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def wrong(kernel: Any, grid: Any, arguments: Mapping[str, Any]) -> None:
        seen.append(kernel)
        run_checked(kernel, grid, {**arguments, "length": arguments["length"] + 1})

    with (
        launch.running(wrong),
        pytest.raises(AssertionError, match=r"softmax_kernel: .*x_ptr has 6 elements"),
    ):
        softmax.softmax(data((2, 3)))
    assert seen == [softmax.softmax_kernel]
