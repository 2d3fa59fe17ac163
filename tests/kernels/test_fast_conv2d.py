"""The convolution kernel in the interpreter, every access checked, against float64."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402

from lowbit.kernels.triton.fast import conv2d  # noqa: E402
from lowbit.kernels.triton.fast.conv2d import ConvConfig  # noqa: E402
from lowbit.kernels.triton.fast.launch import Gpu  # noqa: E402
from lowbit.torch import functional  # noqa: E402
from lowbit_lab import interpreter  # noqa: E402

# A whole unit for bfloat16, which Triton's interpreter cuts off where a GPU rounds.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
# x, weight, stride, padding, dilation: odd sizes, few and many channels, kernels that hang over.
CASES = [
    ((2, 3, 9, 7), (5, 3, 3, 2), (2, 1), (1, 2), (1, 2)),
    ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0, 1),
    ((1, 33, 5, 6), (17, 33, 3, 3), 1, 1, 1),
    ((1, 70, 4, 4), (3, 70, 2, 2), 2, 1, 1),
    ((0, 3, 5, 5), (4, 3, 3, 3), 1, 0, 1),
    ((1, 2, 3, 4), (2, 2, 5, 5), (3, 2), 4, (2, 1)),
]


def data(shape: tuple[int, ...], dtype: Any = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
def test_conv2d(case: Any, memory: Any, dtype: Any) -> None:
    x_shape, w_shape, stride, padding, dilation = case
    x = data(x_shape, dtype).contiguous(memory_format=memory)
    weight, bias = data(w_shape, dtype, 1), data(w_shape[:1], dtype, 2)
    with interpreter():
        got = functional.conv2d(x, weight, bias, stride=stride, padding=padding, dilation=dilation)
    plain = torch.nn.functional.conv2d
    wide = x.double(), weight.double(), bias.double()
    sizes = {"stride": stride, "padding": padding, "dilation": dilation}
    expected = plain(*wide, **sizes)
    terms = plain(*(one.abs() for one in wide), **sizes)
    count = weight[0].numel() + 2
    budget = count * 2.0**-24 * terms + ROUNDING[dtype] * expected.abs() + 2.0**-25
    assert got.dtype is dtype
    assert got.shape == expected.shape
    assert got.is_contiguous(memory_format=memory)
    assert ((got.double() - expected).abs() <= budget).all()


def test_views_and_other_blocks() -> None:
    x = data((2, 12, 9, 40))[:, ::2, 1:, 5:-3].transpose(2, 3)
    weight = data((4, 3, 3, 6)).permute(0, 3, 2, 1)
    with interpreter():
        plain = functional.conv2d(x, weight)
        config = ConvConfig(16, 16, 16, 4, 1)
        other = conv2d.conv2d(x, weight, None, (1, 1), (0, 0), (1, 1), False, config)
    torch.testing.assert_close(other, plain)
    expected = torch.nn.functional.conv2d(x.double(), weight.double())
    torch.testing.assert_close(plain.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("splits", [2, 3, 16])
@pytest.mark.parametrize("biased", [False, True])
def test_terms_that_programs_share(biased: bool, splits: int) -> None:
    x, weight = data((2, 70, 4, 5), torch.bfloat16), data((18, 70, 3, 3), torch.bfloat16, 1)
    bias = data((18,), torch.bfloat16, 2) if biased else None
    config = ConvConfig(16, 16, 16, 4, 1, splits)
    with interpreter():
        got = conv2d.conv2d(x, weight, bias, (1, 1), (1, 1), (1, 1), False, config)
    wide = None if bias is None else bias.double()
    expected = torch.nn.functional.conv2d(x.double(), weight.double(), wide, padding=1)
    budget = ROUNDING[torch.bfloat16] * expected.abs() + 1e-3
    assert ((got.double() - expected).abs() <= budget).all()


@pytest.mark.parametrize("shape", [(2, 16, 3, 5), (1, 33, 1, 1), (0, 8, 3, 3)])
def test_a_kernel_of_one_pixel_is_a_product(shape: tuple[int, ...]) -> None:
    x = data(shape, torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = data((17, shape[1], 1, 1), torch.bfloat16, 1)
    with interpreter():
        got = functional.conv2d(x, weight)
    expected = torch.nn.functional.conv2d(x.double(), weight.double())
    assert got.stride() == torch.empty_like(expected, memory_format=torch.channels_last).stride()
    assert ((got.double() - expected).abs() <= 2.0**-6 * expected.abs() + 1e-2).all()


def test_how_many_programs_share_terms() -> None:
    """So many that each multiprocessor has one, eight at most; none with fewer than four steps."""
    config, gpu = ConvConfig(128, 128, 64, 8, 3), Gpu(90, 132)
    assert config.parts(gpu, 4, 72) == 8
    assert config.parts(gpu, 60, 72) == 2
    assert config.parts(gpu, 100, 72) == 1
    assert config.parts(gpu, 40, 9) == 2
    assert config.parts(gpu, 1, 3) == 1


def test_gradients() -> None:
    given = [data((2, 3, 6, 5)), data((4, 3, 3, 2), seed=1), data((4,), seed=2)]
    leaves = [one.clone().requires_grad_() for one in given]
    wide = [one.double().requires_grad_() for one in given]
    expected = torch.nn.functional.conv2d(*wide, stride=2, padding=1)
    dz = data(tuple(expected.shape), seed=3)
    expected.backward(dz.double())
    with interpreter():
        functional.conv2d(*leaves, stride=2, padding=1).backward(dz)
    for got, right in zip(leaves, wide, strict=True):
        assert got.grad is not None
        assert right.grad is not None
        budget = dz.numel() * 2.0**-24 * float(dz.abs().max()) * float(given[0].abs().max() + 1)
        assert ((got.grad.double() - right.grad).abs() <= budget).all()


@pytest.mark.deep
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_operator_passes_opcheck(memory: Any) -> None:
    x = data((2, 3, 6, 5)).contiguous(memory_format=memory).requires_grad_()
    weight = data((4, 3, 3, 2), seed=1).requires_grad_()
    op = torch.ops.lowbit.conv2d.default
    torch.library.opcheck(op, (x, weight, None, (2, 1), (1, 1), (1, 1), False))
    torch.library.opcheck(op, (x, weight, data((4,)), (1, 1), (0, 0), (1, 1), True))


def test_bad_arguments_are_told() -> None:
    x, weight = data((2, 3, 6, 5)), data((4, 3, 3, 3))
    with pytest.raises(ValueError, match="x has 3 channels and weight takes 2"):
        functional.conv2d(x, weight[:, :2])
    with pytest.raises(ValueError, match=r"x has the shape \[3, 6, 5\]; it must have four"):
        functional.conv2d(x[0], weight)
    with pytest.raises(ValueError, match="the width of x with padding is 5, and the kernel reach"):
        functional.conv2d(x, weight, dilation=(1, 3))
    with pytest.raises(ValueError, match=r"stride is 0; give a whole number of 1 or more"):
        functional.conv2d(x, weight, stride=0)
    with pytest.raises(ValueError, match=r"padding is \(1, 2, 3\); give a whole number"):
        functional.conv2d(x, weight, padding=(1, 2, 3))
    with pytest.raises(ValueError, match=r"bias has the shape \[3\]; it must be \[4\]"):
        functional.conv2d(x, weight, data((3,)))
    with pytest.raises(TypeError, match=r"x is torch\.float32 and weight torch.float16"):
        functional.conv2d(x, weight.half())
    with pytest.raises(TypeError, match="x is float64; give float32"):
        functional.conv2d(x.double(), weight.double())


def test_configurations_are_checked() -> None:
    assert ConvConfig(64, 64, 32, 4, 3).refusal() is None
    assert "depth is 8; it must be 16 or more" in str(ConvConfig(64, 64, 8, 4, 3).refusal())
    assert "num_stages is 0" in str(ConvConfig(64, 64, 32, 4, 0).refusal())
    for table in (*conv2d.TABLE.values(), conv2d._ANY):
        assert all(config.refusal() is None for config in table.values())
