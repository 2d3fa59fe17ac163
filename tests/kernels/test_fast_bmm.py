"""The batched product, in the interpreter at odd shapes and strides."""

from __future__ import annotations

import pytest
import torch

from lowbit.kernels.triton.fast.batched_matmul import MatmulConfig
from lowbit.kernels.triton.fast.batched_matmul import batched_matmul as kernels
from lowbit.torch.functional import bmm
from lowbit_lab import interpreter

# batches, rows, terms, columns
SHAPES = [(1, 33, 40, 17), (3, 50, 7, 50), (2, 1, 64, 96), (2, 16, 1, 1), (1, 290, 17, 20)]
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
CONFIG = MatmulConfig(32, 16, 16, 4, 2)


def operand(shape: tuple[int, ...], dtype: torch.dtype, turned: bool) -> torch.Tensor:
    """Random, with the last two axes the other way round in memory if turned."""
    batches, rows, columns = shape
    made = torch.Generator().manual_seed(sum(shape))
    if turned:
        return torch.randn((batches, columns, rows), generator=made).to(dtype).mT
    return torch.randn(shape, generator=made).to(dtype)


def close(got: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Within the error of a float32 sum of products (Higham, section 3.5) and of one rounding,
    which the interpreter does by cutting off."""
    wanted = x.double() @ y.double()
    terms = x.shape[2] + 2
    budget = terms * 2.0**-24 * (x.double().abs() @ y.double().abs())
    assert ((got.double() - wanted).abs() <= budget + 2 * ROUNDOFF[got.dtype] * wanted.abs()).all()


@pytest.mark.parametrize("y_turned", [False, True])
@pytest.mark.parametrize("x_turned", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDOFF))
@pytest.mark.parametrize("shape", SHAPES)
def test_product(
    shape: tuple[int, ...], dtype: torch.dtype, x_turned: bool, y_turned: bool
) -> None:
    batches, rows, terms, columns = shape
    x = operand((batches, rows, terms), dtype, x_turned)
    y = operand((batches, terms, columns), dtype, y_turned)
    with interpreter():
        z = kernels(x, y, False, CONFIG)
    close(z, x, y)
    assert z.is_contiguous()


def test_strides_of_any_kind() -> None:
    """Every second element, one matrix for all batches, and an address off the alignment."""
    x = operand((3, 20, 2 * 24), torch.float16, False)[:, :, ::2]
    y = operand((1, 24, 33), torch.float16, False)[:, :, 1:].expand(3, 24, 32)
    with interpreter():
        z = kernels(x, y, False, CONFIG)
    close(z, x, y)


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    batches, rows, terms, columns = shape
    with interpreter():
        z = kernels(torch.ones(batches, rows, terms), torch.ones(batches, terms, columns), False)
    assert z.shape == (batches, rows, columns)
    assert (z == 0).all()


def test_the_operator_is_differentiable_twice() -> None:
    x = operand((2, 3, 5), torch.float32, False).double().float().requires_grad_()
    y = operand((2, 5, 4), torch.float32, True).requires_grad_()
    with interpreter():
        z = bmm(x, y)
        dx, dy = torch.autograd.grad(z.square().sum(), (x, y), create_graph=True)
        (twice,) = torch.autograd.grad(dx.square().sum() + dy.sum(), (x,))
    wide_x, wide_y = (one.detach().double().requires_grad_() for one in (x, y))
    exact = (wide_x @ wide_y).square().sum()
    wide_dx, wide_dy = torch.autograd.grad(exact, (wide_x, wide_y), create_graph=True)
    (wide_twice,) = torch.autograd.grad(wide_dx.square().sum() + wide_dy.sum(), (wide_x,))
    for got, wanted in ((dx, wide_dx), (dy, wide_dy), (twice, wide_twice)):
        assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_opcheck() -> None:
    x, y = operand((2, 3, 5), torch.float32, False), operand((2, 5, 4), torch.float32, True)
    leaves = (x.requires_grad_(), y.requires_grad_())
    torch.library.opcheck(torch.ops.lowbit.bmm.default, (*leaves, False))


def test_bad_arguments() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        bmm(x.double(), x.double())
    with pytest.raises(TypeError, match="convert one"):
        bmm(x, x.mT.half())
    with pytest.raises(ValueError, match=r"must be \[2, 4, 3\]"):
        bmm(x, torch.ones(2, 5, 3))
    with pytest.raises(ValueError, match="three dimensions"):
        bmm(x[0], x)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MatmulConfig(48, 16, 16, 4, 2), "power of two"),
        (MatmulConfig(16, 8, 16, 4, 2), "columns is 8; it must be 16 or more"),
        (MatmulConfig(256, 256, 64, 8, 4), "shared memory"),
    ],
)
def test_configurations_that_do_not_fit(config: MatmulConfig, message: str) -> None:
    x = torch.ones(1, 4, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match=message):
        kernels(x, x, False, config)
