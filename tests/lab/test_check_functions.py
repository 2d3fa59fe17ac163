"""Functions of tensors under the checker: the report, the interpreter's bfloat16, the operators of
lowbit.torch.functional and their specifications, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from triton.runtime.jit import KernelInterface  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from lowbit.cli import app  # noqa: E402
from lowbit.kernels.triton.fast import launch  # noqa: E402
from lowbit.spec import Operation, one_of, operation  # noqa: E402
from lowbit.spec.operations import operations  # noqa: E402
from lowbit_lab import check, interpreter, trace_kernel  # noqa: E402
from lowbit_lab.checks.operators import check_gpu, functions  # noqa: E402
from lowbit_lab.run.language import rounded_bits  # noqa: E402

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false


@operation(exercise={"N": 6, "T": 70})
def lengths(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return np.sqrt((x * x).sum(axis=1))


@operation(exercise={"N": 6, "T": 70})
def row_sum(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    return x.sum(axis=1)


if TYPE_CHECKING:
    from typing import Annotated as Either
else:
    Either = one_of("Either", "float32", "float16")


@operation(exercise={"N": 70}, at_most={"N": 99})
def third(x: Either[np.ndarray, "N"]) -> Either[np.ndarray, "N"]:
    return x / 3


@triton.jit
def row_sum_kernel(x_ptr, z_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, T, BLOCK):
        j = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * T + j, mask=j <= T, other=0.0)
    tl.store(z_ptr + row, tl.sum(total, axis=0))


@triton.jit
def convert_kernel(x_ptr, y_ptr, z_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0)
    y = x.to(tl.bfloat16)
    tl.store(y_ptr + i, y, mask=i < count)
    tl.store(z_ptr + i, y * y + y, mask=i < count)


def sums_past_the_end(x: Tensor) -> Tensor:
    x = x.contiguous()
    z = torch.empty(x.shape[0])
    row_sum_kernel[(x.shape[0],)](x, z, x.shape[1], BLOCK=32)
    return z


@pytest.mark.deep
def test_a_finding_names_kernel_line_and_tensor() -> None:
    before = KernelInterface.__getitem__
    result = check(sums_past_the_end, row_sum, device="cpu")
    assert KernelInterface.__getitem__ is before
    first = result.findings[0]
    assert (first.kind, first.kernel) == ("out-of-bounds-load", "row_sum_kernel")
    assert first.place is not None
    assert first.place.file == __file__
    plain = json.loads(result.to_json())
    assert plain["findings"][0]["kernel"] == "row_sum_kernel"
    assert "in row_sum_kernel at" in str(result)
    assert "sums_past_the_end" in result._repr_html_()


def test_layouts_are_tried() -> None:
    seen: set[bool] = set()

    def looks(x: Tensor) -> Tensor:
        seen.add(x.is_contiguous())
        return x.sum(1)

    result = check(looks, row_sum, device="cpu")
    assert result.ok, str(result)
    assert seen == {True, False}


def test_an_error_of_the_host_is_a_finding() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no such configuration")

    (finding,) = check(fails, row_sum, device="cpu").findings
    assert (finding.kind, finding.program) == ("crash", None)
    assert "no such configuration" in finding.message


def numbers() -> np.ndarray:
    """Ties and their neighbours, both zeros, the ends of the range, subnormals, NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4000, np.uint32)
    bits[:1000] = bits[:1000] & 0xFFFF0000 | 0x8000
    bits[1000:1010] = [0, 1 << 31, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
                       0x7FFFFFFF, 0xFFFFFFFF, 1, 0x00008001]  # fmt: skip
    return bits.view(np.float32)


def test_bfloat16_is_rounded_to_even() -> None:
    given = numbers()
    wanted = torch.from_numpy(given.copy()).to(torch.bfloat16).float().numpy()
    made = rounded_bits(given).view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(made, wanted)


def test_kernels_compute_bfloat16_as_torch_does() -> None:
    x = torch.from_numpy(numbers().copy())
    y = torch.zeros(len(x), dtype=torch.bfloat16)
    z = torch.zeros_like(y)
    from lowbit.kernels.triton.fast.launch import launch

    arguments = {"x_ptr": x, "y_ptr": y, "z_ptr": z, "count": len(x), "BLOCK": 128}
    with interpreter():
        launch(convert_kernel, (triton.cdiv(len(x), 128),), arguments)
    wanted = x.to(torch.bfloat16)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(z, wanted * wanted + wanted, rtol=0, atol=0, equal_nan=True)


def test_an_operation_of_several_dtypes() -> None:
    half = third.variant(dtypes="f16")
    assert (half.inputs[0].dtype, half.result.dtype) == ("float16", "float16")
    assert (third.inputs[0].dtype, third.result.dtype) == ("float32", "float32")
    with pytest.raises(ValueError, match=r"no dtypes 's8'; known are f32, f16"):
        third.variant(dtypes="s8")
    with pytest.raises(ValueError, match=r"N is 100; it must be at most 99"):
        third.complete({"N": 100})
    result = check(lambda x: (x.float() / 3).to(x.dtype), half, device="cpu")
    assert result.ok, str(result)
    truncated = check(lambda x: ((x.float() / 3).view(torch.int32) & ~0x3FFF).view(
        torch.float32).to(x.dtype), half, device="cpu")  # fmt: skip
    assert truncated.kinds == ("wrong-values",)


def test_every_specification_has_a_function() -> None:
    assert len(functions()) >= 20
    assert set(functions()) < set(operations.names())
    assert operations.get("attention").signatures == ("bf16", "f16")


@pytest.mark.deep
@pytest.mark.parametrize("name", ["softmax", "layer_norm_dbias"])
def test_an_operator_is_right_in_all_dtypes(name: str) -> None:
    results = list(check_gpu(name, "cpu"))
    assert [result.operation.split(", ")[1] for result in results] == [
        "float32",
        "bfloat16",
        "float16",
    ]
    assert all(results), "\n".join(map(str, results))


def softmax_dx(x: Tensor, dz: Tensor) -> Tensor:
    z = torch.softmax(x.float(), 1)
    return (z * (dz - (z * dz).sum(1, keepdim=True) * 0.97)).to(x.dtype)


def layer_norm_dx(x: Tensor, weight: Tensor, dz: Tensor) -> Tensor:
    x = x.double()
    inverse = (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    n, g = (x - x.mean(1, keepdim=True)) * inverse, dz * weight
    return ((g - n * (g * n).mean(1, keepdim=True)) * inverse).to(dz.dtype)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q.double() @ k.double().repeat_interleave(2, 1).mT / q.shape[3] ** 0.5


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(scores_of(q, k), -1)
    return (weights @ v.double().repeat(1, 2, 1, 1)).to(q.dtype)


def attention_dv(q: Tensor, k: Tensor, v: Tensor, dz: Tensor) -> Tensor:
    weights = torch.softmax(scores_of(q, k) * 1.02, -1)
    return (weights.mT @ dz.double()).unflatten(1, (2, 2)).sum(2).to(q.dtype)


def attention_dq(q: Tensor, k: Tensor, v: Tensor, dz: Tensor) -> Tensor:
    weights = torch.softmax(scores_of(q, k), -1)
    ds = weights * (dz.double() @ v.double().repeat_interleave(2, 1).mT)
    return (ds @ k.double().repeat_interleave(2, 1) / q.shape[3] ** 0.5).to(q.dtype)


def int4_matmul(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4)
    values = ((words[:, :, None] >> shifts) & 15).flatten(1)
    w = (values - 8) * scale.repeat_interleave(128, 1)
    return (x.double() @ w.double().T).to(x.dtype)


@pytest.mark.deep
@pytest.mark.parametrize(
    "function",
    [softmax_dx, layer_norm_dx, attention, attention_dv, attention_dq, int4_matmul],
    ids=lambda function: function.__name__,
)
def test_budgets_are_no_wider_than_mistakes(function: Callable[..., Tensor]) -> None:
    """Each leaves something out, or is two or three percent off; plain numbers show it."""
    result = check(function, operations.get(function.__name__), device="cpu")
    assert "wrong-values" in result.kinds
    plain = [one for one in result.findings if one.kind == "wrong-values"]
    assert plain[0].sizes == operations.get(function.__name__).exercise


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the comparison with the GPU run in the memory of the CPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.deep
@pytest.mark.usefixtures("cpu_as_gpu")
def test_the_comparison_with_a_gpu() -> None:
    on_gpu: list[bool] = []

    def differs(x: Tensor) -> Tensor:
        # The interpreter's run comes first; guard zones lie around what comes second.
        on_gpu.append(x.storage_offset() > 0)
        z = x.sum(1)
        return z + 1 if on_gpu[-1] else z

    result = check(differs, row_sum, device="cuda")
    assert result.devices == ("interpreter", "cuda")
    assert [(one.kind, one.device) for one in result.findings] == [("device-disagrees", "cuda")]
    assert {True, False} == set(on_gpu)

    def wrong_in_both(x: Tensor, more: bool = False) -> Tensor:
        z = x.sum(1)
        z[: 2 if x.storage_offset() and more else 1] += 1
        return z

    result = check(wrong_in_both, row_sum, device="cuda")
    assert set(result.kinds) == {"wrong-values"}
    result = check(lambda x: wrong_in_both(x, more=True), row_sum, device="cuda")
    assert set(result.kinds) == {"wrong-values", "device-disagrees"}

    def overflows(x: Tensor) -> Tensor:
        return (x * x).sum(1).sqrt()

    # Where float32 overflows nothing is judged, there as little as here.
    assert check(overflows, lengths, device="cuda").ok

    def overwrites(x: Tensor) -> Tensor:
        z = x.sum(1)
        if x.storage_offset() > 0:
            whole = torch.as_strided(x, (1,), (1,), x.storage_offset() - 1)
            whole.fill_(0.0)
        return z

    result = check(overwrites, row_sum, device="cuda")
    assert result.kinds == ("guard-overwritten",)

    result = check(lambda x: x.sum(1) + 0 * torch.empty(x.shape[0]), row_sum, device="cuda")
    assert set(result.kinds) >= {"unwritten-read"}


def nothing(y: Tensor) -> Tensor:
    return y


def test_a_softmax_may_be_0_where_it_would_be_denormal() -> None:
    """GPUs take powers of two so: dx is then off by 2^-126 times dz, which is no denormal."""
    inputs = {"x": np.array([[0, -87.4]], np.float32), "dz": np.array([[0, 700]], np.float32)}
    expected = operations.get("softmax_dx").case({"N": 1, "T": 2}).expect(inputs)
    exact = expected.reference
    assert np.abs(exact).max() > 2.0**-118
    assert not expected.wrong(np.zeros((1, 2), np.float32)).any()
    assert expected.wrong(np.full((1, 2), 4 * exact[0, 1], np.float32)).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check(nothing, row_sum), r"no parameter 'x'; it has y"),
        (lambda: check(lambda x, scale: x, row_sum), r"takes 'scale', which is no input"),
        (lambda: check(lambda x: x, row_sum, BLOCK=3), r"no parameter 'BLOCK'; it has x"),
        (lambda: check(lambda x: x, row_sum, grid=3), r"leave\s+out grid, output and initial"),
        (lambda: list(check_gpu("sofmax")), r"no operator gpu:sofmax; there are .*gpu:softmax"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@triton.jit
def copy_through_a_descriptor(x, z_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr + i[:, None] * B + i[None, :], x.load([0, 0]))


def test_the_interpreter_takes_descriptors() -> None:
    x, z = torch.randn(16, 16), torch.empty(16, 16)
    descriptor = TensorDescriptor.from_tensor(x, [16, 16])
    with interpreter():
        launch.launch(copy_through_a_descriptor, (1, 1, 1), {"x": descriptor, "z_ptr": z, "B": 16})
    assert torch.equal(x, z)


def test_only_a_kernel_can_be_shown() -> None:
    with pytest.raises(TypeError, match="only a single kernel can be shown"):
        trace_kernel(sums_past_the_end, row_sum)


@pytest.mark.deep
def test_the_command() -> None:
    run = CliRunner().invoke
    right = run(app, ["check", "gpu:row_sum", "--device", "cpu"])
    assert right.exit_code == 0, right.output
    assert "gpu:row_sum (row_sum, float16): right" in right.output
    unknown = run(app, ["check", "gpu:nothing"])
    assert unknown.exit_code == 2
    assert "gpu:attention" in unknown.output
    shown = run(app, ["view", "gpu:softmax"])
    assert shown.exit_code == 2
    assert "view one kernel" in shown.output


def test_halves_are_tried() -> None:
    @operation(exercise={"N": 70}, special=True)
    def negated(x: BFloat16[np.ndarray, "N"]) -> BFloat16[np.ndarray, "N"]:
        return -x

    assert isinstance(negated, Operation)
    result = check(lambda x: -x, negated, device="cpu")
    assert result.ok, str(result)
