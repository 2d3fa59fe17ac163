"""Which operators of ATen's core set run: `python tools/operators_aten.py [NAME...]`.

Each operator that PyTorch tags as core is called with arguments that it gets in PyTorch's own
samples (OpInfo), those of lowbit's dtypes. The call is exported, compiled by lowbit and compared
with what PyTorch gives. Operators that give no tensor, draw random numbers or are the backward of
others are left out.
"""

from __future__ import annotations

import logging
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.torch import compile

DTYPES = torch.float32, torch.int64, torch.bool
SAMPLES = 4  # of each operator and dtype
_ONE_OUTPUT = tuple(f"aten.{name}" for name in (
    "_embedding_bag", "_native", "native", "max_pool", "topk", "sort",
))  # fmt: skip
"""Of these the other outputs are for a backward, or are places of which equal numbers have many."""
_ELEMENTS = 4096  # of a tensor, at most
_LEFT_OUT = ("_backward", "sym_", "rand", "native_dropout", ".out", "_local_scalar", "resize_")
_aten = torch.ops.aten

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Row(NamedTuple):
    """An operator, how many of its samples run and give what PyTorch gives, and why others do not:
    the first error."""

    operator: str
    runs: int
    of: int
    reason: str


def core_operators() -> list[OpOverload]:
    """Those that networks consist of, by name."""
    names = sorted({one.name for one in torch._C._jit_get_all_schemas()})
    packets = [getattr(_aten, name[6:]) for name in names if name.startswith("aten::")]
    every = [getattr(one, overload) for one in packets for overload in one.overloads()]
    core = [one for one in every if torch.Tag.core in one.tags]
    return [one for one in core if not any(part in str(one) for part in _LEFT_OUT)]


class _Recorded(TorchDispatchMode):
    """Keeps the arguments of calls of operators, the first few of each kind of tensors."""

    def __init__(self, calls: dict[OpOverload, list[Call]], dtype: torch.dtype) -> None:
        super().__init__()
        self.calls, self.dtype, self.counts = calls, dtype, Counter[OpOverload]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in self.calls and self.counts[func] < SAMPLES and _fits((args, named)):
            self.counts[func] += 1
            kept = pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), (args, named))
            self.calls[func].append(kept)
        return func(*args, **named)


def _fits(arguments: Any) -> bool:
    """Whether arguments are plain tensors of dtypes that networks have."""
    leaves = pytree.tree_leaves(arguments)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    served = (*DTYPES, torch.int32)
    asked = all(one in served for one in leaves if isinstance(one, torch.dtype))
    return (
        bool(tensors)
        and asked
        and all(
            one.dtype in served and one.numel() <= _ELEMENTS and one.layout is torch.strided
            for one in tensors
        )
    )


def samples(operators: Sequence[OpOverload], most: int) -> dict[OpOverload, list[Call]]:
    """Arguments of each, as PyTorch's samples bring them about: `most`, or all that there are."""
    if "expecttest" not in sys.modules:  # which they import and do not need
        stand_in: Any = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    calls: dict[OpOverload, list[Call]] = {one: [] for one in operators}
    wanted = {one._schema.name.partition("::")[2].strip("_") for one in operators}

    def relation(one: Any) -> tuple[bool, bool, str]:
        """What is named like an operator comes first, then what is a part of an operator's name."""
        last = one.name.rpartition(".")[2]
        return one.name not in wanted, not any(last in name for name in wanted), one.name

    by_use = sorted(op_db, key=relation)
    lacking = [one for one in operators if not _own(name_of(one))]
    # Seeds are kept with a stack's text for each kind of accelerator, whether or not one is here.
    with patch.object(torch, "manual_seed", torch.default_generator.manual_seed):
        for dtype in DTYPES:
            record = _Recorded(calls, dtype)
            for info in by_use:
                lacking = [one for one in lacking if len(calls[one]) < most]
                if not lacking:
                    return calls
                if dtype in info.dtypes:
                    _record(info, dtype, record)
    return calls


def _own(name: str) -> list[Call]:
    """Arguments for operators that PyTorch's samples reach by others, or never."""
    x, image, line = torch.randn(2, 3, 5), torch.randn(1, 2, 4, 6), torch.randn(3)
    vectors = line, line + 1, line, line.abs() + 1
    calls: dict[str, list[Any]] = {
        "_embedding_bag": [(torch.randn(9, 4), torch.tensor([1, 2, 8]), torch.tensor([0, 2]))],
        "_fft_c2r": [(torch.randn(2, 3, dtype=torch.complex64), [1], 0, 4)],
        "_native_batch_norm_legit.no_stats": [(x, line, line, True, 0.1, 1e-5)],
        "_native_batch_norm_legit_no_training": [(x, *vectors, 0.1, 1e-5)],
        "adaptive_avg_pool1d": [(x, [2]), (x, [1])],
        "arange.start_step": [(1, 9, 2)],
        "avg_pool1d": [(x, [2], [1], [1])],
        "col2im": [(torch.randn(1, 8, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
        "copy": [(x, x[:1])],
        "div.Scalar_mode": [(x, 0.7), (x, 3)],
        "empty.memory_format": [([2, 3],)],
        "empty_strided": [([2, 3], [3, 1])],
        "full": [([2, 3], 1.5)],
        "pow.Scalar": [(2.0, x)],
        "reflection_pad3d": [(image, [1, 1, 2, 0, 1, 0])],
        "replication_pad3d": [(image, [1, 1, 2, 0, 1, 0])],
        "scalar_tensor": [(1.5,)],
        "scatter.value": [(x, 1, torch.tensor([[[0, 2]]]), 1.5)],
        "slice_scatter": [(x, x[:, :1], 1, 1, 2)],
        "upsample_bilinear2d.vec": [(image, [8, 9], False, None), (image, None, True, [2.0, 2.0])],
        "upsample_nearest2d.vec": [(image, [8, 9], None), (image, None, [2.0, 2.0])],
        "var.dim": [(x, [1])],
    }  # fmt: skip
    if name.endswith(".Scalar") and name not in calls:
        whole = torch.randint(-4, 5, (2, 3))
        calls[name] = [(whole, 3)] if "bitwise" in name else [(x, 0.7), (whole, 3)]
    modes: dict[str, Any] = {"div.Scalar_mode": {"rounding_mode": "floor"}}
    return [(args, modes.get(name, {})) for args in calls.get(name, [])]


def _record(info: Any, dtype: torch.dtype, record: _Recorded) -> None:
    torch.manual_seed(0)
    try:
        for count, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=False)):
            if count == 2 * SAMPLES:
                return
            with record, torch.no_grad():
                info.op(sample.input, *sample.args, **sample.kwargs)
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return  # a sample that this build of PyTorch does not serve


class _Called(nn.Module):
    """A call whose tensors are the inputs."""

    def __init__(self, function: OpOverload, call: Call) -> None:
        super().__init__()
        self.function = function
        self.leaves, self.spec = pytree.tree_flatten(call)
        self.places = [i for i, one in enumerate(self.leaves) if isinstance(one, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, one in zip(self.places, tensors, strict=True):
            leaves[place] = one
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = self.function(*args, **kwargs)
        only = isinstance(made, tuple) and str(self.function).startswith(_ONE_OUTPUT)
        return made[0] if only else made


def outcome(function: OpOverload, call: Call) -> str:
    """Why a call does not run; "": it gives what PyTorch gives."""
    module = _Called(function, call)
    tensors = tuple(module.leaves[place] for place in module.places)
    try:
        wanted = module(*tensors)
        got = compile(module, tensors, batch=False)(*tensors)
    except Exception as error:  # of any class: it is the answer
        text = str(error).strip() or type(error).__name__
        return text.splitlines()[0][:160]
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)
    empty = str(function).startswith("aten.empty")
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"gives {one.dtype} {list(one.shape)} for {other.dtype} {list(other.shape)}"
        close = torch.allclose(one.double(), other.double(), 1e-4, 1e-5, equal_nan=True)
        if not close and not empty:
            return f"other numbers for {', '.join(str(list(x.shape)) for x in tensors)}"
    return ""


def aten_rows(names: Sequence[str] = (), most: int = SAMPLES * len(DTYPES)) -> Iterator[Row]:
    """A row for each core operator, or for those of these names, of so many samples at most."""
    operators = [one for one in core_operators() if not names or name_of(one) in names]
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            calls = samples(operators, most)
            for function in operators:
                some = calls[function] or _own(name_of(function))
                yield _row(name_of(function), [outcome(function, call) for call in some[:most]])
        finally:
            logging.disable(before)


def _row(name: str, found: Sequence[str]) -> Row:
    bad = Counter(filter(None, found))
    reason = bad.most_common(1)[0][0] if bad else "" if found else "PyTorch has no sample"
    return Row(name, len(found) - sum(bad.values()), len(found), reason)


def name_of(function: OpOverload) -> str:
    return str(function).removeprefix("aten.").removesuffix(".default")


if __name__ == "__main__":
    rows = []
    for row in aten_rows(sys.argv[1:]):
        rows.append(row)
        print(f"{row.operator:40} {row.runs:2} of {row.of:2}  {row.reason}", flush=True)
    whole = sum(row.runs == row.of > 0 for row in rows)
    print(f"{whole} of {len(rows)} run in every sample")
