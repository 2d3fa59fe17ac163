"""Element by element: every format, every way to lie in memory, against NumPy in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.kernels.tensors.data import (
    AFFINE,
    DTYPES,
    SIZES,
    assert_same,
    data,
    poisoned,
    real,
    stored,
)

from lowbit.graph.expression import error_function as erf
from lowbit.isa import active
from lowbit.kernels.cpu.shared.formats import parameters_of
from lowbit.kernels.cpu.shared.post_op import post_ops
from lowbit.kernels.cpu.tensors.elementwise import (
    elementwise,
    parameters_array,
    plan_copy,
    plan_elementwise,
)
from lowbit.spec.post_ops import FUNCTIONS

RunAll = Callable[..., dict[str, np.ndarray]]


def _steps(array: np.ndarray) -> list[int]:
    """Strides in elements."""
    return [stride // array.itemsize for stride in array.strides]


def _run(
    run_all: RunAll,
    out: tuple[str, np.ndarray],
    inputs: Sequence[tuple[str, np.ndarray]],
    expression: Sequence[int | str],
    numbers: Sequence[float] = (),
    interpret: bool = True,
) -> np.ndarray:
    """The output of the kernel, in the array given for it; inputs are broadcast to its shape."""
    name, target = out
    arrays = [target, *(np.broadcast_to(array, target.shape) for _, array in inputs)]
    strides = [_steps(one) for one in arrays]
    plan = plan_elementwise([n for n, _ in inputs], name, expression, target.shape, strides)
    affine = [AFFINE[n] for n, _ in inputs if parameters_of(n)]
    given = [array for _, array in inputs] + [None] * (3 - len(inputs))
    arguments: dict[str, Any] = {
        "out": target,
        **dict(zip("abc", given, strict=True)),
        "parameters": parameters_array(affine, numbers, AFFINE.get(name)),
        "geometry": plan.geometry,
        "items": plan.items,
    }
    return run_all(elementwise, arguments, interpret=interpret, form=plan.form)["out"]


BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "min": lambda a, b: np.where(np.isnan(a), a, np.where(a < b, a, b)),
    "max": lambda a, b: np.where(np.isnan(a), a, np.where(b < a, a, b)),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("formats", ["u8 s8 u8", "f32 f32 f32", "s8 f32 bf16", "bf16 s32 s8"])
def test_sizes_and_formats(run_all: RunAll, formats: str, size: int) -> None:
    a, b, out = formats.split()
    rng = np.random.default_rng(size)
    x, y = data(rng, a, (size,)), data(rng, b, (size,))
    got = _run(run_all, (out, poisoned(out, (size,))), [(a, x), (b, y)], (0, 1, "add"))
    with np.errstate(all="ignore"):
        total = real(x, AFFINE.get(a)) + real(y, AFFINE.get(b))
        assert_same(got, stored(total, out, AFFINE.get(out)))


@pytest.mark.parametrize("operation", BINARY)
@pytest.mark.parametrize("formats", ["u8 u8 s8", "f32 f32 f32"])
def test_every_operation(run_all: RunAll, operation: str, formats: str) -> None:
    """Of bytes: all pairs."""
    a, b, out = formats.split()
    rng = np.random.default_rng(1)
    x, y = (data(rng, name, (256, 256)) for name in (a, b))
    if a == "u8":
        x, y = (one.astype(np.uint8) for one in np.indices((256, 256)))
    target = poisoned(out, (256, 256))
    got = _run(run_all, (out, target), [(a, x), (b, y)], (0, 1, operation), interpret=False)
    with np.errstate(all="ignore"):
        result = BINARY[operation](real(x, AFFINE.get(a)), real(y, AFFINE.get(b)))
        assert_same(got, stored(result.astype(np.float32), out, AFFINE.get(out)))


@pytest.mark.parametrize("operation", BINARY)
def test_every_operation_interpreted(run_all: RunAll, operation: str) -> None:
    rng = np.random.default_rng(1)
    x, y = data(rng, "f32", (150,)), data(rng, "s8", (150,))
    got = _run(run_all, ("f32", poisoned("f32", (150,))), [("f32", x), ("s8", y)],
               (0, 1, operation))  # fmt: skip
    with np.errstate(all="ignore"):
        assert_same(got, BINARY[operation](x, real(y, AFFINE["s8"])).astype(np.float32))


def test_three_inputs_numbers_and_functions(run_all: RunAll) -> None:
    """where(c, clamp(a·2.5 + b), −a), with the number and the bounds given at run time."""
    rng = np.random.default_rng(3)
    a, b, c = data(rng, "u8", (7, 33)), data(rng, "f32", (33,)), data(rng, "u8", (7, 1))
    c[:3] = AFFINE["u8"][1]  # 0.0
    expression = (2, 0, "number", "mul", 1, "add", "clamp", 0, "neg", "where")
    got = _run(run_all, ("f32", poisoned("f32", (7, 33))), [("u8", a), ("f32", b), ("u8", c)],
               expression, [2.5, -1.0, 3.0])  # fmt: skip
    with np.errstate(all="ignore"):
        x, condition = real(a, AFFINE["u8"]), np.broadcast_to(c != AFFINE["u8"][1], a.shape)
        bounded = np.clip(x * np.float32(2.5) + b, np.float32(-1), np.float32(3))
    assert_same(got, np.where(condition, bounded, x * np.float32(-1)))


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if not post_ops.get(f).parameters])
def test_functions_of_bytes(run_all: RunAll, function: str) -> None:
    x = np.arange(256).astype(np.uint8)
    got = _run(run_all, ("s8", poisoned("s8", (256,))), [("u8", x)], (0, function))
    exact = FUNCTIONS[function].meaning(real(x, AFFINE["u8"]).astype(np.float64))
    exact = np.clip(exact / AFFINE["s8"][0] + AFFINE["s8"][1], -128, 127)
    assert (np.abs(got - exact) <= 0.5 + 1e-3).all()


@pytest.mark.parametrize("formats", ["f32 u8", "u8 f32", "u8 u8", "s8 u8", "f32 bf16", "bf16 f32"])
def test_conversions(run_all: RunAll, formats: str) -> None:
    a, out = formats.split()
    x = data(np.random.default_rng(4), a, (3, 65))
    got = _run(run_all, (out, poisoned(out, (3, 65))), [(a, x)], (0,))
    with np.errstate(all="ignore"):
        assert_same(got, stored(real(x, AFFINE.get(a)), out, AFFINE.get(out)))


UNARY = {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt}
# In float64, and what is allowed: of the result, and of 1.
WIDE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    "exp": (np.exp, 3e-7, 1.2e-38),
    "log": (np.log, 3e-7, 0),
    "erf": (erf, 0, 5e-7),
    "softplus": (lambda x: np.logaddexp(x, 0), 3e-7, 1.2e-38),
    "mish": (lambda x: x * np.tanh(np.logaddexp(x, 0)), 3e-6, 1e-30),
    "nearest": (np.rint, 0, 0),
    "floor": (np.floor, 0, 0),
    "ceil": (np.ceil, 0, 0),
    "trunc": (np.trunc, 0, 0),
    "sin": (np.sin, 2e-7, 1e-7),
    "cos": (np.cos, 2e-7, 1e-7),
    "tan": (np.tan, 4e-7, 1e-7),
    "sinh": (np.sinh, 5e-7, 0),
    "cosh": (np.cosh, 5e-7, 0),
    "asin": (np.arcsin, 4e-7, 0),
    "acos": (np.arccos, 4e-7, 0),
    "atan": (np.arctan, 3e-7, 1e-38),
    "asinh": (np.arcsinh, 4e-7, 1e-38),
    "acosh": (np.arccosh, 4e-7, 0),
    "atanh": (np.arctanh, 4e-7, 1e-38),
}


@pytest.mark.parametrize("operation", UNARY)
def test_every_unary_operation(run_all: RunAll, operation: str) -> None:
    x = data(np.random.default_rng(5), "f32", (150,))
    got = _run(run_all, ("f32", poisoned("f32", (150,))), [("f32", x)], (0, operation))
    with np.errstate(all="ignore"):
        assert_same(got, UNARY[operation](x))


@pytest.mark.parametrize("operation", WIDE)
def test_every_function(run_all: RunAll, operation: str) -> None:
    x = data(np.random.default_rng(5), "f32", (150,))
    x[:9] = 88.5, 88.9, 0.5, 1.5, -2.5, -86, 1e-3, -1e-3, 100
    if operation in ("asin", "acos", "atanh"):
        x[9:20] = np.linspace(-1, 1, 11)
    if operation in ("sin", "cos", "tan", "mish"):
        x[~np.isfinite(x) | (np.abs(x) > 8000)] = 7000
    got = _run(run_all, ("f32", poisoned("f32", x.shape)), [("f32", x)], (0, operation))
    meaning, relative, absolute = WIDE[operation]
    with np.errstate(all="ignore"):
        expected = meaning(x.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(got, expected, rtol=relative, atol=absolute)


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["u1", "i2", "u4", "i8"])
@pytest.mark.parametrize("swapped", [False, True])
def test_bits(run_all: RunAll, dtype: str, swapped: bool) -> None:
    """Of all integers, dense and in steps; an operand is broadcast."""
    random, info = np.random.default_rng(7), np.iinfo(dtype)
    x, y = (random.integers(info.min, info.max, s, dtype, True) for s in ((33, 9), (9, 33)))
    y, raw = y.T if swapped else y[:, ::-1].T[::-1], f"raw{x.itemsize}"
    for name, meaning in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        for one in (y, y[:1], y[:, :1]):
            got = _run(run_all, (raw, np.zeros_like(x)), [(raw, x), (raw, one)],
                       (0, 1, f"bits_{name}"))  # fmt: skip
            np.testing.assert_array_equal(got, meaning(x, one))
    got = _run(run_all, (raw, np.zeros_like(x)), [(raw, y)], (0, "bits_not"))
    np.testing.assert_array_equal(got, ~y)


def test_functions_of_two_numbers(run_all: RunAll) -> None:
    random = np.random.default_rng(6)
    x = data(random, "f32", (150,))
    y = random.integers(-4, 5, 150).astype(np.float32)
    got = _run(
        run_all, ("f32", poisoned("f32", x.shape)), [("f32", x), ("f32", y)], (0, 1, "power")
    )
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
    tiny = np.abs(expected) < 1e-37
    np.testing.assert_allclose(got[~tiny], expected[~tiny], rtol=1e-5)
    got = _run(
        run_all, ("f32", poisoned("f32", x.shape)), [("f32", x)], (0, "number", "elu"), [1.3]
    )
    with np.errstate(all="ignore"):
        expected = np.where(x > 0, x, np.float32(1.3) * np.expm1(x.astype(np.float64)))
    np.testing.assert_allclose(got, expected, rtol=3e-7)


@pytest.mark.parametrize("name", ["s32", "s64"])
def test_wide_integers(run_all: RunAll, name: str) -> None:
    dtype = np.int32 if name == "s32" else np.int64
    x = (np.random.default_rng(7).standard_normal(77) * 1000).astype(np.float32)
    plan = plan_elementwise(["f32"], name, (0,), (77,), [(1,), (1,)])
    back = plan_elementwise([name], "f32", (0,), (77,), [(1,), (1,)])
    scales = np.array([1, 0], np.float32)
    made: dict[str, Any] = {}
    for one, (source, out) in ((plan, (x, dtype)), (back, (x.astype(dtype), np.float32))):
        arguments = {
            "out": np.full(77, 9, out), "a": source, "b": None, "c": None, "parameters": scales,
            "geometry": one.geometry, "items": one.items,
        }  # fmt: skip
        made[one.form.out] = run_all(elementwise, arguments, form=one.form)["out"]
    np.testing.assert_array_equal(made[name], x.astype(dtype))
    np.testing.assert_array_equal(made["f32"], x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("operation", ["less", "equal"])
def test_truth(run_all: RunAll, operation: str) -> None:
    """As bytes of 0 and 1: an output of scale 1, zero point 0."""
    rng = np.random.default_rng(6)
    x, y = (rng.choice(np.array([0.0, -0.0, 1, np.nan, np.inf], np.float32), 99) for _ in "xy")
    plan = plan_elementwise(["f32", "f32"], "u8", (0, 1, operation), (99,), [(1,)] * 3)
    arguments = {
        "out": poisoned("u8", (99,)), "a": x, "b": y, "c": None,
        "parameters": parameters_array([], out=(1, 0)),
        "geometry": plan.geometry, "items": plan.items,
    }  # fmt: skip
    got = run_all(elementwise, arguments, form=plan.form)["out"]
    np.testing.assert_array_equal(got, x < y if operation == "less" else x == y)


def test_halves_round_to_even(run_all: RunAll) -> None:
    scale = AFFINE["u8"] = (0.5, 3)
    try:
        x = (np.arange(-20, 520, dtype=np.float32) / 2) * np.float32(0.5)
        got = _run(run_all, ("u8", poisoned("u8", x.shape)), [("f32", x)], (0,))
    finally:
        AFFINE["u8"] = (0.037, 117)
    assert_same(got, np.clip(np.rint(x / scale[0]) + scale[1], 0, 255).astype(np.uint8))


def test_a_fill(run_all: RunAll) -> None:
    got = _run(run_all, ("u8", poisoned("u8", (5, 1, 31))), [], ("number",), [0.0])
    assert (got == AFFINE["u8"][1]).all()


BROADCAST = [
    ((4, 17, 5), (17, 5), (5,)),
    ((4, 17, 5), (4, 1, 5), (1, 17, 1)),
    ((4, 17, 5), (1, 1, 1), (4, 17, 1)),
    ((2, 3, 4, 5, 6, 7), (2, 1, 4, 1, 6, 1), (1, 3, 1, 5, 1, 7)),
    ((3, 40, 8, 9), (3, 40, 1, 1), (3, 40, 8, 9)),
    ((300, 70), (300, 1), (1, 70)),
    ((), (), ()),
]


@pytest.mark.parametrize("shapes", BROADCAST, ids=str)
def test_broadcasting(run_all: RunAll, shapes: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(5)
    shape, *given = shapes
    x, y = data(rng, "u8", given[0]), data(rng, "f32", given[1])
    got = _run(run_all, ("f32", poisoned("f32", shape)), [("u8", x), ("f32", y)], (0, 1, "mul"),
               interpret=math.prod(shape) < 4000)  # fmt: skip
    with np.errstate(all="ignore"):
        assert_same(got, np.broadcast_to(real(x, AFFINE["u8"]) * y, shape))


def _layouts(rng: np.random.Generator, dtype: np.dtype[Any]) -> dict[str, tuple[Any, Any]]:
    """(where the output lies, what is read): views of one shape."""

    def some(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8).view(dtype)[..., 0]

    def new(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype)

    return {
        "copy": (new(5, 67), some(5, 67)),
        "slice": (new(4, 6, 9), some(9, 20, 30)[1::2, 3:9, 5:23:2]),
        "reversed": (new(5, 33), some(5, 33)[::-1, ::-1]),
        "concat": (new(5, 90)[:, 17:80], some(5, 63)),
        "interleaved": (new(40, 3)[:, 1], some(40)),
        "expanded": (new(6, 20, 3), np.broadcast_to(some(6, 1, 3), (6, 20, 3))),
        "columns to rows": (new(67, 50), some(50, 67).T),
        "rows to columns": (new(50, 67).T, some(67, 50)),
        "batches": (new(3, 37, 18), some(3, 18, 37).transpose(0, 2, 1)),
        "to channels last": (new(2, 5, 23, 3), some(2, 3, 5, 23).transpose(0, 2, 3, 1)),
        "from channels last": (new(2, 3, 5, 23), some(2, 5, 23, 3).transpose(0, 3, 1, 2)),
        "heads": (new(2, 4, 30, 16), some(2, 30, 4, 16).transpose(0, 2, 1, 3)),
        "shuffle": (new(2, 3, 4, 5, 2, 2), some(2, 2, 2, 5, 4, 3).transpose(0, 5, 4, 3, 2, 1)),
        "tile in a gap": (new(40, 50)[3:39, 7:48], some(60, 60)[5:46, 2:38].T),
        "empty": (new(0, 5), some(5, 0).T),
        "scalar": (new(), some()),
        "large": (new(300, 290), some(290, 300).T),
    }


@pytest.mark.parametrize("dtype", ["u1", "bool", "u2", "f4", "i8"])
@pytest.mark.parametrize("layout", _layouts(np.random.default_rng(0), np.dtype("u1")))
def test_copies(run_all: RunAll, layout: str, dtype: str) -> None:
    """All bits, also those of NaN; what lies around the output is left as it is."""
    out, source = _layouts(np.random.default_rng(6), np.dtype(dtype))[layout]
    plan = plan_copy(out.itemsize, out.shape, [_steps(out), _steps(source)])
    memory = {"out": out, "a": source, "b": None, "c": None, "parameters": None}
    got = run_all(elementwise, {**memory, "geometry": plan.geometry, "items": plan.items},
                  interpret=out.size < 4000, form=plan.form)["out"]  # fmt: skip
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(source).tobytes()
    assert isinstance(got.base, np.ndarray)
    written = [np.count_nonzero(np.frombuffer(one.tobytes(), np.uint8)) for one in (got.base, got)]
    assert written[0] == written[1]


def _view(rng: np.random.Generator, dtype: str, shape: Sequence[int], output: bool) -> np.ndarray:
    """A view of this shape in memory of another: permuted, in steps, with gaps, repeated."""
    steps = rng.choice([1, 1, 1, 2, 3], len(shape))
    before = rng.choice([0, 0, 0, 1, 5], len(shape))
    repeated = (rng.random(len(shape)) < 0.25) & (not output)
    sizes = np.where(repeated, 1, np.array(shape) * steps + before)
    order = rng.permutation(len(shape))
    memory = rng.integers(0, 256, sizes[order]).astype(dtype)
    if output:
        memory[...] = 0
    slices = (
        slice(0, 1) if again else slice(int(start), None, int(step))
        for again, start, step in zip(repeated, before, steps, strict=True)
    )
    view = memory.transpose(np.argsort(order))[tuple(slices)]
    return view if output else np.broadcast_to(view, shape)


@pytest.mark.parametrize("seed", range(8))
def test_copies_of_random_views(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        shape = rng.choice([1, 2, 3, 5, 16, 17, 33], rng.integers(1, 5)).tolist()
        dtype = str(rng.choice(["u1", "u2", "f4", "i8"]))
        out, source = (_view(rng, dtype, shape, output) for output in (True, False))
        plan = plan_copy(out.itemsize, shape, [_steps(out), _steps(source)])
        program = elementwise.program(active(), form=plan.form)
        program.bind(2, (), out=out, a=source, b=None, c=None, parameters=None,
                     geometry=plan.geometry, items=plan.items)()  # fmt: skip
        np.testing.assert_array_equal(out, source)
        assert isinstance(out.base, np.ndarray)
        assert np.count_nonzero(out.base) == np.count_nonzero(out)


@pytest.mark.parametrize("formats", ["f32 u8", "u8 f32", "u8 s8"])
@pytest.mark.parametrize(
    "layout", ["to channels last", "from channels last", "batches", "slice", "interleaved"]
)
def test_conversions_of_strided_tensors(run_all: RunAll, layout: str, formats: str) -> None:
    a, out = formats.split()
    target, _ = _layouts(np.random.default_rng(0), DTYPES[out])[layout]
    _, source = _layouts(np.random.default_rng(7), DTYPES[a])[layout]
    got = _run(run_all, (out, target), [(a, source)], (0,))
    with np.errstate(all="ignore"):
        assert_same(np.ascontiguousarray(got),
              stored(real(source, AFFINE.get(a)), out, AFFINE.get(out)))  # fmt: skip


def test_in_place(run_all: RunAll) -> None:
    rng = np.random.default_rng(8)
    x, y = data(rng, "u8", (3, 1000)), data(rng, "u8", (3, 1000))
    expected = stored(real(x, AFFINE["u8"]) + real(y, AFFINE["u8"]), "u8", AFFINE["u8"])
    got = _run(run_all, ("u8", x), [("u8", x), ("u8", y)], (0, 1, "add"), interpret=False)
    assert_same(got, expected)


def test_a_long_tensor_in_several_items(run_all: RunAll) -> None:
    x = data(np.random.default_rng(9), "s8", (50_001,))
    got = _run(run_all, ("f32", poisoned("f32", x.shape)), [("s8", x)], (0,), interpret=False)
    assert_same(got, real(x, AFFINE["s8"]))


@pytest.mark.parametrize(
    ("inputs", "out", "expression", "message"),
    [
        (["f16"], "f32", (0,), "no format"),
        (["f32"] * 4, "f32", (0,), "three inputs"),
        (["raw4"], "raw4", (0, "neg"), "copied"),
        (["raw4"], "raw8", (0,), "copied"),
        (["f32"], "f32", (1,), "no input 1"),
        (["f32"], "f32", (0, "add"), "lacks operands"),
        (["f32"], "f32", (0, 0), "one result"),
        (["f32"], "f32", (0, "bias"), "needs a tensor"),
        (["f32"], "f32", (0, "tangent"), "tangent"),
    ],
)
def test_what_is_refused(
    inputs: list[str], out: str, expression: tuple[int | str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_elementwise(inputs, out, expression, (4,), [(1,)] * (1 + len(inputs)))


def test_strides_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        plan_copy(1, (3, 4), [(4, 1), (1,)])
    shape = (2,) * 7
    scattered = [3**i for i in range(7)]
    with pytest.raises(NotImplementedError, match="at most 6"):
        plan_copy(1, shape, [scattered, scattered[::-1]])
