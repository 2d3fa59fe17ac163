"""Known-wrong kernels are caught and named; unusual right ones pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lowbit_lab import check
from lowbit_lab.backends.source import load
from lowbit_lab.languages.triton import TritonKernel

HERE = Path(__file__).parent
WRONG = [known for path in sorted(HERE.glob("wrong/*.py")) for known in load(path).WRONG]
UNUSUAL = [known for path in sorted(HERE.glob("unusual/*.py")) for known in load(path).UNUSUAL]


def _names(known: list[Any]) -> list[str]:
    return [f"{TritonKernel.of(kernel).name}-{finding}" for kernel, _, finding, *_ in known]


def _checked(kernel: Any, wanted: Mapping[str, Any], stop: bool = False) -> Any:
    return check(kernel, device="cpu", stop=stop, **wanted)


def test_there_are_enough() -> None:
    assert len({kernel for kernel, *_ in WRONG}) >= 20
    assert len(UNUSUAL) >= 8


@pytest.mark.deep(
    "adds_again_when_tuned-tuned-twice",
    "attention_pads_keys_with_infinity-wrong-values",
    "changed_in_place_when_tuned-tuned-twice",
    "inner_stride_of_the_second_block-out-of-bounds-load",
    "number_becomes_a_block-not-compiled",
    "offsets_of_16_bits-unwritten",
    "wrong_in_two_blocks_when_tuned_otherwise-block-sizes",
    "wrong_when_tuned_otherwise-block-sizes",
)
@pytest.mark.parametrize(("kernel", "wanted", "finds", "line"), WRONG, ids=_names(WRONG))
def test_a_wrong_kernel_is_caught_and_named(
    kernel: Any, wanted: Mapping[str, Any], finds: str, line: str | None
) -> None:
    # What the first case does not show, others have to.
    result = _checked(kernel, wanted, stop=True)
    if finds not in result.kinds:
        result = _checked(kernel, wanted)
    assert not result.ok
    assert finds in result.kinds, str(result)
    finding = next(f for f in result.findings if f.kind == finds)
    assert finding.sizes or finds == "not-compiled"
    if line is not None:
        function = TritonKernel.of(kernel).text
        lines, first = inspect.getsourcelines(function)
        places = [f.place for f in result.findings if f.kind == finds]
        shown = [lines[place.line - first] for place in places if place is not None]
        assert any(line in text for text in shown), shown


@pytest.mark.drawn(12)
@pytest.mark.deep
@pytest.mark.parametrize(("kernel", "wanted", "warnings"), UNUSUAL, ids=_names(UNUSUAL))
def test_an_unusual_kernel_passes(
    kernel: Any, wanted: Mapping[str, Any], warnings: tuple[str, ...]
) -> None:
    result = _checked(kernel, wanted)
    assert result.ok, str(result)
    assert {f.kind for f in result.findings} - {"offset-overflow"} == set(warnings)
