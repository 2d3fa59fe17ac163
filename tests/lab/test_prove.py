"""Bounds proved for all programs, and for all sizes: they agree with what the interpreter sees."""

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import Float32

torch = pytest.importorskip("torch")
pytest.importorskip("z3")

import z3  # noqa: E402

from lowbit.spec.exercises import add_constant_blocks  # noqa: E402
from lowbit_lab import check, watch  # noqa: E402
from lowbit_lab.backends.backend import Request, Variant  # noqa: E402
from lowbit_lab.backends.language import bound  # noqa: E402
from lowbit_lab.backends.source import load, request_named  # noqa: E402
from lowbit_lab.checks import cases  # noqa: E402
from lowbit_lab.prove.bounds import Extent  # noqa: E402
from lowbit_lab.prove.launches import _as_it_is, bounds_of_sizes, in_words  # noqa: E402
from lowbit_lab.prove.operations import MEANINGS, scalar  # noqa: E402
from lowbit_lab.prove.ttir import NotProvedError, Op  # noqa: E402
from lowbit_lab.run.bind import TensorArgument  # noqa: E402

HERE = Path(__file__).parent
WRONG = [known for path in sorted(HERE.glob("wrong/*.py")) for known in load(path).WRONG]
UNUSUAL = [known for path in sorted(HERE.glob("unusual/*.py")) for known in load(path).UNUSUAL]
if torch.cuda.is_available():  # what is compared here is the interpreter
    pytest.skip("these programs would run on the GPU", allow_module_level=True)


# One launch: Z3 and the interpreter say the same.


@triton.jit
def rounded_up(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + tl.minimum(i, N - 1), i)


@triton.jit
def remainders(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i % N, i)


@triton.jit
def quotients(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + (i - 8) // 4 + N // 2, i)


@triton.jit
def shifted(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + (i >> 1) + ((i & 3) << 1), i)


@triton.jit
def chosen(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + tl.where(i % 2 == 0, i, N - i), i, mask=(i < N) & (i != 0))


@triton.jit
def turned(z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    grid = i[:, None] * N + tl.arange(0, 4)[None, :]
    tl.store(z_ptr + tl.trans(grid), tl.trans(grid))


@triton.jit
def flattened(z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)[:, None] * N + tl.arange(0, 4)[None, :]
    tl.store(z_ptr + tl.reshape(i, (B * 4,)), 1)


@triton.jit
def downwards(z_ptr, N, B: tl.constexpr):
    for j in range(N // B, 0, -1):
        tl.store(z_ptr + (j - 1) * B + tl.arange(0, B), j)


@triton.jit
def pointer_goes_on(z_ptr, N, B: tl.constexpr):
    p = z_ptr + tl.arange(0, B)
    for _ in range(tl.cdiv(N, B)):
        tl.store(p, 1)
        p += B
    tl.store(p - B, 2)


@triton.jit
def nested(z_ptr, N, B: tl.constexpr):
    for i in range(N):
        for j in range(i):
            tl.store(z_ptr + i * B + j, 1)


@triton.jit
def only_the_first(z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    p = tl.program_id(0)
    if p == 0:
        tl.store(z_ptr + i, i)
    elif p * B + B <= N:
        tl.store(z_ptr + p * B + i, i)


@triton.jit
def as_bytes(z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr.to(tl.pointer_type(tl.int8)) + i * 4 + 3, i.to(tl.int8))


@triton.jit
def counted(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, B)
    tl.atomic_add(z_ptr + i, 1)


@triton.jit
def in_64_bits(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * 3_000_000_000 + tl.arange(0, B)
    tl.store(z_ptr + i % 3_000_000_000 + tl.program_id(0) * B, 1)


@triton.jit
def described(z_ptr, N, B: tl.constexpr):
    d = tl.make_tensor_descriptor(z_ptr, [N, 16], [16, 1], [B, 16])
    d.store([tl.program_id(0) * B, 0], d.load([tl.program_id(0) * B, 4]) + 1)


@triton.jit
def leaves_early(z_ptr, N, B: tl.constexpr):
    p = tl.program_id(0)
    if p == 0:
        return
    if p * B >= N:
        tl.store(z_ptr, 1)
        return
    tl.store(z_ptr + p * B + tl.arange(0, B), 1)


@triton.jit
def returns_a_place(p, B: tl.constexpr):
    if p == 0:
        return 3
    if p == 1:
        return B
    return p


@triton.jit
def places(z_ptr, N, B: tl.constexpr):
    tl.store(z_ptr + returns_a_place(tl.program_id(0), B), 1)


# A kernel, N, B, programs, and the elements that it needs.
LAUNCHES = [
    (rounded_up, 21, 8, 3, 21), (remainders, 13, 8, 3, 13), (quotients, 8, 8, 3, 8),
    (shifted, 0, 8, 2, 14), (chosen, 12, 8, 2, 12), (turned, 5, 8, 1, 39), (flattened, 4, 8, 1, 32),
    (downwards, 35, 8, 1, 32), (pointer_goes_on, 30, 8, 1, 32), (nested, 4, 8, 1, 27),
    (only_the_first, 23, 8, 3, 16), (as_bytes, 0, 8, 1, 8), (counted, 0, 8, 3, 24),
    (in_64_bits, 0, 8, 3, 24), (described, 11, 8, 2, 176),
    (leaves_early, 17, 8, 4, 24), (places, 0, 8, 3, 9),
]  # fmt: skip


def _proved(kernel: Any, size: int, N: int, B: int, programs: int) -> tuple[bool, str]:
    with watch() as log:
        kernel[(programs,)](torch.zeros(size, dtype=torch.int32), N, B=B)
    said = log.bounds[kernel.__name__]["z_ptr"]
    outside = any(kind.startswith("out-of-bounds") for kind in log.kinds)
    assert outside == ("element offset" in said), said
    return not outside, said


@pytest.mark.parametrize(
    ("kernel", "N", "B", "programs", "needed"),
    LAUNCHES,
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_it_agrees_with_the_interpreter(
    kernel: Any, N: int, B: int, programs: int, needed: int
) -> None:
    inside, said = _proved(kernel, needed, N, B, programs)
    assert inside
    assert said == "in bounds for all programs: proved"
    inside, said = _proved(kernel, needed - 1, N, B, programs)
    assert not inside
    assert said.startswith("in bounds for all programs: not proved: program [")


@triton.jit
def gathered(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    index = tl.load(x_ptr + i)
    tl.store(z_ptr + index, 1, mask=(index >= 0) & (index < N))
    tl.store(z_ptr + i + index, 1, mask=index + i < N)


def test_what_is_loaded_is_not_known() -> None:
    with watch() as log:
        x, z = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        gathered[(1,)](x, z, 8, B=8)
    assert log.ok
    assert log.bounds["gathered"]["x_ptr"].endswith(": proved")
    assert "not proved: it depends on tt.load at test_prove.py" in log.bounds["gathered"]["z_ptr"]


@triton.jit
def very_long(z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    for _ in tl.static_range(400):
        i = i * 3 % 7 + i % 2
    tl.store(z_ptr + i % N, 1)


@triton.jit
def split(z_ptr, N, B: tl.constexpr):
    left, right = tl.split(tl.reshape(tl.arange(0, B), (B // 2, 2)))
    tl.store(z_ptr + left, right)


@pytest.mark.deep
def test_what_is_not_understood_is_not_proved() -> None:
    with watch() as log:
        very_long[(1,)](torch.zeros(8, dtype=torch.int32), 8, B=8)
        split[(1,)](torch.zeros(8, dtype=torch.int32), 8, B=8)
    assert log.ok
    said = "in bounds for all programs: not proved: "
    assert log.bounds["very_long"]["z_ptr"].startswith(f"{said}its text is too long")
    assert log.bounds["split"]["z_ptr"].startswith(f"{said}it depends on tt.split at test_prove")


@triton.jit
def overflows(z_ptr, N, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(z_ptr + i * 300_000_000 // 300_000_000, i)


def test_integers_that_overflow_are_not_proved() -> None:
    with watch() as log:
        overflows[(1,)](torch.zeros(8, dtype=torch.int32), 8, B=8)
        overflows[(2,)](torch.zeros(16, dtype=torch.int32), 16, B=8)
    assert "overflow" in log.bounds["overflows"]["z_ptr"]
    assert "out-of-bounds-store" in log.kinds


@pytest.mark.parametrize(
    ("how", "left", "right", "holds"),
    [
        ("slt", -1, 1, True), ("ult", -1, 1, False), ("ugt", -1, 1, True), ("ule", 3, 3, True),
        ("uge", 2, -2, False),
    ],
)  # fmt: skip
def test_unsigned_numbers_are_those_of_their_bits(
    how: str, left: int, right: int, holds: bool
) -> None:
    op = Op("arith.cmpi", ("%c",), ("%a", "%b"), f"arith.cmpi {how}, %a, %b : i32", ("i32",))
    made = MEANINGS[op.name](op, [scalar(left), scalar(right)])
    assert made is not None
    assert z3.is_true(z3.simplify(made.at(()))) is holds


def test_launches_of_one_kernel_share_a_line_and_the_worst_counts() -> None:
    with watch() as log:
        for size in (24, 23, 24):
            counted[(3,)](torch.zeros(size, dtype=torch.int32), 0, B=8)
    assert "program [2, 0, 0]" in log.bounds["counted"]["z_ptr"]


GAPS = [
    ((3, 4), (4, 1)), ((3, 4), (6, 1)), ((4, 3), (1, 5)), ((3, 1, 2), (9, 7, 2)), ((2, 3), (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "strides"), GAPS)
def test_gaps_are_outside(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    offset = z3.Int("offset")
    inside = Extent(shape, strides, 4).inside(offset, 4)
    covered = {4 * int(np.dot(index, strides)) for index in np.ndindex(*shape)}
    for place in range(-8, 120, 4):
        holds = z3.is_true(z3.simplify(z3.substitute(inside, (offset, z3.IntVal(place)))))
        assert holds == (place in covered), place


# All sizes.

# Right with contiguous tensors, which is what is proved.
_LAYOUTS = (
    "assumes_dense_rows", "gap_behind_a_row_is_forgotten", "inner_stride_of_the_second_block",
)  # fmt: skip


def _bounds(kernel: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    named = ("spec", "output", "initial")
    stated = {name: one for name, one in wanted.items() if name in named}
    given = {name: one for name, one in wanted.items() if name not in (*named, "grid")}
    variant = Variant(kernel, grid=wanted.get("grid"), constants=given)
    return bounds_of_sizes(bound(Request(variant, **stated)))


@pytest.mark.parametrize("name", ["outer_mul_relu", "long_softmax", "flash_attention", "conv2d",
                                  "batched_matmul", "quantized_matmul"])  # fmt: skip
def test_teaching_kernels_stay_in_bounds_at_all_sizes(name: str) -> None:
    verdicts = bounds_of_sizes(bound(request_named(name)))
    assert len(verdicts) >= 2
    assert {in_words(one, "sizes") for one in verdicts.values()} == {
        "in bounds for all sizes: proved"
    }


@pytest.mark.deep
def test_what_leaves_a_tensor_is_never_proved() -> None:
    found = 0
    for kernel, wanted, finds, *_ in WRONG:
        if finds.startswith("out-of-bounds") and kernel.__name__ not in _LAYOUTS:
            verdicts = _bounds(kernel, wanted)
            assert not all(one.proved for one in verdicts.values()), kernel.__name__
            found += any(one.wrong for one in verdicts.values())
    assert found >= 8


@pytest.mark.deep
def test_what_stays_in_bounds_is_never_said_to_leave() -> None:
    proved = 0
    for kernel, wanted, *_ in UNUSUAL:
        verdicts = _bounds(kernel, wanted)
        assert not any(one.wrong for one in verdicts.values()), kernel
        proved += bool(verdicts) and all(one.proved for one in verdicts.values())
    assert proved >= 20


def plus_ten(x: Float32[np.ndarray, "N0"]) -> Float32[np.ndarray, "N0"]:
    return x + 10.0


@triton.jit
def wrong_at_one_size(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=(i < N0) | (N0 == 123))
    tl.store(z_ptr + i, x + 10.0, mask=i < N0)


@pytest.mark.deep
def test_a_size_that_no_case_has_is_found_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried() -> Any:
        grid = lambda meta: triton.cdiv(meta["N0"], meta["B0"])  # noqa: E731
        return check(wrong_at_one_size, plus_ten, grid=grid, device="cpu")

    result = tried()
    assert result.kinds == ("out-of-bounds-load",)
    assert result.findings[0].sizes == {"N0": 123}
    assert "not proved: with N0=123 program [3, 0, 0] reads" in result.bounds["x_ptr"]
    assert "  z_ptr: in bounds for all sizes: proved" in str(result)
    monkeypatch.setattr(cases, "available", lambda: False)
    result = tried()
    assert result.ok
    assert not result.bounds


@triton.jit
def unmasked_if_even(x_ptr, z_ptr, N0, EVEN: tl.constexpr, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    inside = (i < N0) | EVEN
    tl.store(z_ptr + i, tl.load(x_ptr + i, mask=inside) + 10.0, mask=inside)


@pytest.mark.parametrize(
    "even", [lambda args: args["N0"] > 100_000_000, lambda args: not args["N0"] % 10_007]
)
def test_constants_that_follow_from_sizes_are_not_proved(even: Any) -> None:
    kernel = triton.heuristics({"EVEN": even})(unmasked_if_even)
    grid = lambda meta: triton.cdiv(meta["N0"], meta["B0"])  # noqa: E731
    verdicts = _bounds(kernel, {"spec": add_constant_blocks, "grid": grid})
    assert verdicts
    assert not any(one.proved for one in verdicts.values())


def test_elements_of_another_size_are_not_proved() -> None:
    stands = TensorArgument("x", 0, "int16")
    with pytest.raises(NotProvedError):
        _as_it_is(stands, "int8")
    _as_it_is(stands, "float16")
