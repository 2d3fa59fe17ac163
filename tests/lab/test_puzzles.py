"""Solutions of exercises as they come: torch specifications with numbers, and no grid."""

# pyright: reportArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from jaxtyping import Float32

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from lowbit.spec import from_function  # noqa: E402
from lowbit.spec.free_sizes import extents, named  # noqa: E402
from lowbit_lab import check, check_file  # noqa: E402
from lowbit_lab.backends.language import bound  # noqa: E402
from lowbit_lab.backends.source import request_of_file  # noqa: E402
from lowbit_lab.checks.cases import check_request  # noqa: E402

FOLDER = Path(__file__).parent / "puzzles"
RIGHT = [path for path in sorted(FOLDER.glob("*.py")) if not path.stem.endswith("_wrong")]
# The sizes that are read from the numbers; of the others the specification runs at no other.
SIZES: dict[str, dict[str, int]] = {
    "01_constant": {"N0": 32},
    "02_constant_blocks": {"N0": 200},
    "03_outer_sum": {"N0": 32, "N1": 32},
    "04_outer_sum_blocks": {"N0": 100, "N1": 90},
    "05_outer_product_relu": {"N0": 100, "N1": 90},
    "06_backward": {"N0": 100, "N1": 90},
    "07_long_sum": {"N0": 4, "T": 200},
    "08_long_softmax": {"N0": 4, "T": 200},
    "09_flash_attention": {"N0": 200, "T": 200},
    "10_convolution": {},
    "11_matrix_product": {"N0": 32, "N1": 32, "N2": 4, "MID": 32},
    "12_quantized_product": {},
}


# Their one program has a block of all elements, which a kernel without a mask relies on.
WHOLE = ("01_constant", "03_outer_sum")


def test_there_are_twelve() -> None:
    assert [path.stem for path in RIGHT] == list(SIZES)


@pytest.mark.deep(
    "09_flash_attention",
    "11_matrix_product",
    "08_long_softmax",
    "12_quantized_product",
    "10_convolution",
    "06_backward",
)
@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_a_solution_is_right(path: Path) -> None:
    request = request_of_file(path)
    subject = bound(request)
    assert subject.operation.exercise == SIZES[path.stem]
    # Other sizes are tried too, where the specification runs at them.
    assert len({tuple(case.sizes.items()) for case in subject.cases()[0]}) >= (
        12 if SIZES[path.stem] and path.stem not in WHOLE else 1
    )
    result = check_request(request, "cpu", few=True)
    assert result.ok, str(result)


@pytest.mark.deep("09_*", "1*_*")
@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_a_wrong_solution_is_wrong(path: Path) -> None:
    result = check_file(path.with_stem(f"{path.stem}_wrong"), "cpu", stop=True)
    assert not result.ok
    # The sizes are read so that as little as may be is wrong.
    assert result.findings[0].sizes == SIZES[path.stem]
    assert result.findings[0].fill == "normal"


def scaled(x: Float32[Tensor, "6 40"], y: Float32[Tensor, "40"]) -> Float32[Tensor, "6 40"]:
    return x * y


def six_rows(x: Float32[Tensor, "6 40"]) -> Float32[Tensor, "6 40"]:
    return x + torch.ones(6, 1)


def together(x: Float32[Tensor, "6 40"], y: Float32[Tensor, "40"]) -> Float32[Tensor, "6 40"]:
    assert abs(len(x) - 6) + abs(len(y) - 40) < 2
    return x * y


def test_numbers_that_may_be_others() -> None:
    rows, columns = extents(from_function(scaled))
    assert (rows.number, rows.axes, rows.free) == (6, (("x", 0), ("z", 0)), True)
    assert columns.axes == (("x", 1), ("y", 0), ("z", 1))
    operation = named(from_function(scaled), {"R": rows})
    assert [one.dims for one in operation.stated] == [("R", "40"), ("40",), ("R", "40")]
    assert operation.exercise == {"R": 6}
    assert [one.free for one in extents(from_function(six_rows))] == [False, True]
    # Each by itself may be another, both may not.
    assert not any(one.free for one in extents(from_function(together)))


@triton.jit
def first_of(x_ptr, at, B0: tl.constexpr):
    return x_ptr + tl.program_id(0) * B0 + at


@triton.jit
def by_a_helper(x_ptr, out_ptr, N0, B0: tl.constexpr):
    at = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(first_of(x_ptr, tl.arange(0, B0), B0), mask=at < N0)
    tl.store(out_ptr + at, 2 * x, mask=at < N0)


@triton.jit
def of_rows(x_ptr, z_ptr, ROWS, B0: tl.constexpr):
    tl.store(z_ptr + tl.program_id(0), tl.load(x_ptr + tl.program_id(0)) * 2)


def scaled_rows(x: Float32[Tensor, "6 40"]) -> Float32[Tensor, "6 40"]:
    return 2 * x


def doubled(x: Float32[Tensor, "70"]) -> Float32[Tensor, "70"]:
    return 2 * x


def doubled_any(x: Float32[Tensor, "N0"]) -> Float32[Tensor, "N0"]:
    return 2 * x


@triton.jit
def of_a_vector(x_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    at = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + at, mask=at < n_elements)
    tl.store(output_ptr + at, x + x, mask=at < n_elements)


@pytest.mark.deep
def test_of_vectors_any_names_will_do() -> None:
    result = check(of_a_vector, doubled, device="cpu")
    assert result.ok, str(result)
    assert result.cases > 20


@triton.jit
def without_masks(x_ptr, z_ptr, N0, B0: tl.constexpr):
    at = tl.arange(0, B0)
    tl.store(z_ptr + at, 2 * tl.load(x_ptr + at))


@triton.jit
def blocks_without_masks(x_ptr, z_ptr, N0, B0: tl.constexpr):
    at = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + at, 2 * tl.load(x_ptr + at))


def doubled_32(x: Float32[Tensor, "32"]) -> Float32[Tensor, "32"]:
    return 2 * x


def doubled_96(x: Float32[Tensor, "96"]) -> Float32[Tensor, "96"]:
    return 2 * x


@pytest.mark.deep
def test_a_number_that_its_block_divides_stays_so() -> None:
    assert check(without_masks, doubled_32, device="cpu")
    result = check(blocks_without_masks, doubled_96, device="cpu", stop=True)
    assert result.ok, str(result)
    assert result.cases > 15
    # Seventy are no multiple of a block, so masks are missing.
    assert not check(blocks_without_masks, doubled, device="cpu", stop=True)


@pytest.mark.deep
@pytest.mark.parametrize("spec", [doubled, doubled_any])
def test_no_grid_is_needed_from_python_either(spec: Any) -> None:
    result = check(by_a_helper, spec, device="cpu")
    assert result.ok, str(result)
    assert result.cases > 20


def test_a_grid_that_no_name_says_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"along axis 0 of the grid.*there is no size N0; give"):
        check(of_rows, scaled_rows, device="cpu")
