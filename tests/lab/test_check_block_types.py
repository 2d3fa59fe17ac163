"""Block types that are made once are what Triton makes, and shapes that it refuses stay refused."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from lowbit_lab.run.block_types import replacements

SEMANTIC = type(interpreter.interpreter_semantic)


@pytest.fixture
def plain_and_replaced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What describes types and tensors of the same arguments: Triton's, then ours, made twice."""

    def described() -> dict[str, object]:
        found: dict[str, object] = {}
        for dtype in (tl.int32, tl.bfloat16, tl.pointer_type(tl.float32)):
            for shape in ([4], [1], [2, 8]):
                block = tl.block_type(dtype, shape)
                data = interpreter.TensorHandle(np.zeros(shape, np.uint16), tl.bfloat16)
                made = tl.tensor(data, block)
                found[f"{dtype}{shape}"] = (
                    (block.name, block.numel, list(block.shape), block.scalar),
                    (int(made.numel.value), [int(n.value) for n in made.shape], made.dtype),
                )
        return found

    plain = described()
    for holder, name, value in replacements(tl, SEMANTIC):
        monkeypatch.setattr(holder, name, value)
    return [plain, described(), described()]


def test_they_are_what_triton_makes(plain_and_replaced: list[dict[str, object]]) -> None:
    plain, first, again = plain_and_replaced
    assert plain == first == again


@pytest.mark.usefixtures("plain_and_replaced")
@pytest.mark.parametrize("shape", [[4.0], [3], [2, 8.0], []])
def test_what_triton_refuses_is_refused(shape: list[float]) -> None:
    tl.block_type(tl.int32, [4])
    with pytest.raises((TypeError, ValueError)):
        tl.block_type(tl.int32, shape)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("plain_and_replaced")
def test_a_type_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("checked again")

    tl.block_type(tl.int32, [2, 8])
    monkeypatch.setattr("triton.language.core.validate_block_shape", refuse)
    assert tl.block_type(tl.int32, [2, 8]).numel == 16
