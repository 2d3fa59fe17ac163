"""The same kernel on the GPU: the same inputs, with a guard zone around every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.lab.check_judge import wrong_values
from lowbit.lab.check_tensor import CheckedTensor, widened
from lowbit.lab.report import Finding
from lowbit.spec import Array, Case, Expected

if TYPE_CHECKING:
    from lowbit.lab.check_subject import Run, Tested

_GUARD = 4096
_PATTERN = 0x5A


def wanted(device: str | None, tested: Tested) -> bool:
    """Whether to run on the GPU. ValueError or RuntimeError if that is asked for in vain."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be cpu or cuda")
    if not tested.runs_on_gpu and device == "cuda":
        raise ValueError("only Triton kernels are run on the GPU; check this one with device cpu")
    if device == "cpu" or not tested.runs_on_gpu:
        return False
    try:
        import torch
    except ModuleNotFoundError:
        available = False
    else:
        available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RuntimeError("there is no GPU that PyTorch can use; check with device cpu")
    return available


def compare(
    tested: Tested, case: Case, inputs: Mapping[str, Array], run: Run, expected: Expected
) -> list[Finding]:
    """Run on the GPU and compare with the reference, the interpreter and the guard zones."""
    import torch

    fresh = tested.tensors(case, inputs)
    held = {tensor.name: _guarded(tensor) for tensor in fresh}
    try:
        result = tested.start(case, {one.name: _view(held[one.name], one) for one in fresh})
        torch.cuda.synchronize()
    except Exception as error:  # what Triton's compiler or the driver raises has no common kind
        text = str(error).strip().splitlines() or ["without a message"]
        return [Finding("crash", f"{type(error).__name__}: {text[0]}", device="cuda")]
    findings: list[Finding] = []
    for tensor in fresh:
        after = held[tensor.name].cpu().numpy()
        if _overwritten(after, tensor):
            message = f"bytes around or between the elements of {tensor.name} were changed"
            findings.append(
                Finding("guard-overwritten", message, tensor=tensor.name, device="cuda")
            )
    output = run.output
    got = widened(array_of(result), output.type.dtype)
    wrong = expected.wrong(got)
    if wrong.any():
        alike = expected.wrong(run.result)[wrong].all()
        kind = "wrong-values" if alike else "device-disagrees"
        findings.append(wrong_values(kind, output, expected, got, wrong, None, "cuda"))
    return findings


def array_of(tensor: Any) -> Array:
    """The elements of a torch tensor in the dtype in which they are kept: bfloat16 as uint16."""
    import torch

    plain = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return plain.contiguous().view(torch.int16).numpy().view(np.uint16)
    return plain.numpy()


def dtype_of(tensor: Any) -> str:
    """The name of a torch tensor's dtype, without torch's."""
    return str(tensor.dtype).removeprefix("torch.")


def _guarded(tensor: CheckedTensor) -> Any:
    import torch

    whole = np.full(2 * _GUARD + tensor.storage.size, _PATTERN, np.uint8)
    whole[_GUARD : _GUARD + tensor.storage.size] = tensor.storage
    return torch.from_numpy(whole).cuda()


def _view(held: Any, tensor: CheckedTensor) -> Any:
    import torch

    dtype = getattr(torch, tensor.type.dtype)
    inside = held[_GUARD : _GUARD + tensor.storage.size].view(dtype)
    return torch.as_strided(inside, tensor.shape, tensor.strides)


def _overwritten(after: Array, tensor: CheckedTensor) -> bool:
    """Whether a byte changed that is no element's."""
    size = tensor.storage.size
    gaps = np.repeat(tensor.element < 0, tensor.itemsize)
    inside = after[_GUARD : _GUARD + size]
    around = np.concatenate([after[:_GUARD], after[_GUARD + size :]])
    return bool((around != _PATTERN).any() or (inside[gaps] != tensor.storage[gaps]).any())
