"""Addresses that travel as integers: in tensors of them, as numbers, through memory."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from jaxtyping import Float32  # noqa: E402

from lowbit.spec import Case, from_function  # noqa: E402
from lowbit_lab import watch  # noqa: E402
from lowbit_lab.backends.backend import Request, Variant  # noqa: E402
from lowbit_lab.backends.language import bound  # noqa: E402
from lowbit_lab.run.outcome import Run, Trial  # noqa: E402
from lowbit_lab.watched import watch as watched  # noqa: E402
from lowbit_lab.watched.log import Log  # noqa: E402

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

if torch.cuda.is_available():  # what is watched here is the interpreter
    pytest.skip("these programs would run on the GPU", allow_module_level=True)


@triton.jit
def doubles(x_table, z_table, sizes, MORE: tl.constexpr, B: tl.constexpr):
    """Each program one tensor of a table."""
    g = tl.program_id(0)
    x_ptr = tl.load(x_table + g).to(tl.pointer_type(tl.float32))
    z_ptr = tl.load(z_table + g).to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + g) + MORE
    for start in range(0, size, B):
        i = start + tl.arange(0, B)
        x = tl.load(x_ptr + i, mask=i < size)  # through an address
        tl.store(z_ptr + i, 2 * x, mask=i < size)


def table(tensors: Any, dtype: Any = torch.int64) -> Any:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=dtype)


def doubled(xs: Any, zs: Any, more: int = 0, dtype: Any = torch.int64) -> bool:
    """Launches the kernel on tables of these tensors; whether the result is right."""
    sizes = torch.tensor([one.numel() for one in xs], dtype=torch.int32)
    doubles[(len(xs),)](table(xs, dtype), table(zs, dtype), sizes, MORE=more, B=8)
    return all(torch.equal(z, 2 * x) for x, z in zip(xs, zs, strict=True))


def in_a_table() -> None:
    xs = [torch.randn(n) for n in (5, 30, 8)]
    assert doubled(xs, [torch.empty_like(x) for x in xs])


def in_a_table_without_signs() -> None:
    xs = [torch.randn(n) for n in (5, 8)]
    assert doubled(xs, [torch.empty_like(x) for x in xs], dtype=torch.uint64)


def of_parts_of_one_memory() -> None:
    whole = torch.randn(4, 16)
    assert doubled([whole[0], whole[1]], [whole[2], whole[3]])


BEFORE = torch.arange(12.0)


def of_tensors_from_before() -> None:
    assert doubled([BEFORE], [torch.empty(12)])


def of_arrays() -> None:
    x = np.arange(12.0, dtype=np.float32)
    assert doubled([torch.from_numpy(x)], [torch.empty(12)])


@triton.jit
def adds_one_at(address, first, N, B: tl.constexpr):
    x_ptr = address.to(tl.pointer_type(tl.float32)) + first
    i = tl.arange(0, B)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < N) + 1, mask=i < N)


def as_a_number() -> None:
    x = torch.zeros(10)
    adds_one_at[(1,)](x.data_ptr(), 3, 5, B=8)
    assert x.tolist() == [0] * 3 + [1] * 5 + [0] * 2


def moved_by_the_host() -> None:
    x = torch.zeros(10)
    adds_one_at[(1,)](x.data_ptr() + 5 * 4, -2, 5, B=8)
    assert x.tolist() == [0] * 3 + [1] * 5 + [0] * 2


def beside_the_tensor_itself() -> None:
    x, z = torch.ones(8), torch.empty(8)
    copies[(1,)](x, z.data_ptr(), z, 8, B=8)
    assert z.sum() == 16


@triton.jit
def copies(x_ptr, address, z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(address.to(tl.pointer_type(tl.float32)) + i, tl.load(x_ptr + i, mask=i < N), i < N)
    tl.store(z_ptr + i, 2 * tl.load(z_ptr + i, mask=i < N), mask=i < N)


@triton.jit
def adds_in_integers(address, z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    x_ptr = (address + 4 * i).to(tl.pointer_type(tl.float32))
    tl.store(z_ptr + i, tl.load(x_ptr, mask=i < N) + 1, mask=i < N)


def computed_in_integers() -> None:
    x, z = torch.zeros(5), torch.empty(5)
    adds_in_integers[(1,)](x.data_ptr(), z, 5, B=8)
    assert z.sum() == 5


@triton.jit
def gathers(table, z_ptr, B: tl.constexpr):
    x_ptr = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32), bitcast=True)
    i = tl.arange(0, B)
    tl.store(z_ptr + tl.program_id(0) * B + i, tl.load(x_ptr + i))


def by_a_bitcast() -> None:
    xs, z = [torch.ones(4), torch.zeros(4)], torch.empty(8)
    gathers[(2,)](table(xs), z, B=4)
    assert z.tolist() == [1] * 4 + [0] * 4


@triton.jit
def fills_a_table(x_ptr, table, stride, B: tl.constexpr):
    g = tl.arange(0, B)
    tl.store(table + g, (x_ptr + g * stride).to(tl.int64))


def made_by_a_kernel() -> None:
    x, addresses, z = torch.arange(8.0), torch.empty(2, dtype=torch.int64), torch.empty(8)
    fills_a_table[(1,)](x, addresses, 4, B=2)
    assert addresses.tolist() == [x.data_ptr(), x.data_ptr() + 16]
    gathers[(2,)](addresses, z, B=4)
    assert torch.equal(x, z)


@triton.jit
def skips_what_is_not_there(table, z_ptr, B: tl.constexpr):
    address = tl.load(table + tl.program_id(0))
    x_ptr = address.to(tl.pointer_type(tl.float32))
    i = tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=(address != 0) & (i < B), other=7.0)
    tl.store(z_ptr + tl.program_id(0) * B + i, x)


def of_nothing() -> None:
    z = torch.empty(8)
    x = torch.ones(4)
    addresses = torch.tensor([0, x.data_ptr()])
    skips_what_is_not_there[(2,)](addresses, z, B=4)
    assert z.tolist() == [7] * 4 + [1] * 4


RIGHT = [
    in_a_table, in_a_table_without_signs, of_parts_of_one_memory, of_tensors_from_before, of_arrays,
    as_a_number, moved_by_the_host, beside_the_tensor_itself, computed_in_integers,
    by_a_bitcast, made_by_a_kernel, of_nothing,
]  # fmt: skip


@pytest.mark.parametrize("program", RIGHT)
def test_addresses_of_living_tensors_are_these_tensors(program: Callable[[], None]) -> None:
    with watch() as log:
        program()
    assert not log.findings, str(log)


def one_element_too_far() -> None:
    xs = [torch.randn(n) for n in (16, 16)]
    doubled(xs, [torch.empty(17), torch.empty(17)], more=1)


def one_element_too_far_in_a_store() -> None:
    xs = [torch.randn(16)[:15]]
    doubled(xs, [torch.empty(15)], more=1)


def of_a_freed_tensor() -> None:
    addresses = torch.tensor([torch.ones(4).data_ptr() for _ in range(2)])
    gathers[(2,)](addresses, torch.empty(8), B=4)


def of_a_freed_tensor_where_another_lies() -> None:
    gone = torch.ones(4)
    addresses = torch.tensor([gone.data_ptr()])
    del gone
    others = [torch.zeros(4) for _ in range(20)]  # one of them may lie there now
    gathers[(1,)](addresses, torch.empty(4), B=4)
    assert others


def of_no_tensor() -> None:
    adds_one_at[(1,)](1 << 40, 0, 5, B=8)


def of_nothing_without_a_mask() -> None:
    gathers[(1,)](torch.zeros(1, dtype=torch.int64), torch.empty(4), B=4)


def before_the_first_element() -> None:
    adds_one_at[(1,)](torch.zeros(10).data_ptr(), -1, 5, B=8)


def of_memory_that_nobody_wrote() -> None:
    x = torch.empty(10)
    adds_one_at[(1,)](x.data_ptr(), 0, 5, B=8)


def left_unwritten() -> None:
    z = torch.empty(9)
    doubled([torch.ones(8)], [z])


@triton.jit
def all_write_to(address):
    tl.store(address.to(tl.pointer_type(tl.int32)), tl.program_id(0))


def written_by_two_programs() -> None:
    z = torch.empty(1, dtype=torch.int32)
    all_write_to[(2,)](z.data_ptr())


@triton.jit
def reads_of_others(x_ptr, address, B: tl.constexpr):
    p = tl.program_id(0)
    tl.store(address.to(tl.pointer_type(tl.float32)) + p, tl.load(x_ptr + (p + 1) % B) + 1)


def read_and_written_by_two_names() -> None:
    x = torch.zeros(4)
    reads_of_others[(4,)](x, x.data_ptr(), B=4)


@triton.jit
def uses_undefined_lanes(address, N, B: tl.constexpr):
    x_ptr = address.to(tl.pointer_type(tl.float32))
    i = tl.arange(0, B)
    tl.store(x_ptr, tl.max(tl.load(x_ptr + i, mask=i < N), axis=0))


def with_undefined_lanes() -> None:
    x = torch.full((5,), -1.0)
    uses_undefined_lanes[(1,)](x.data_ptr(), 5, B=8)
    assert x.tolist()[1:] == [-1] * 4, "a second run leaves what the first has made"


WRONG = [
    (one_element_too_far, "out-of-bounds-load", "tl.load(x_ptr + i, mask=i < size)"),
    (one_element_too_far_in_a_store, "out-of-bounds-store", "tl.store(z_ptr + i, 2 * x"),
    (of_a_freed_tensor, "out-of-bounds-load", "tl.load(x_ptr + i)"),
    (of_a_freed_tensor_where_another_lies, "out-of-bounds-load", "tl.load(x_ptr + i)"),
    (of_no_tensor, "out-of-bounds-load", "tl.load(x_ptr + i, mask=i < N)"),
    (of_nothing_without_a_mask, "out-of-bounds-load", "tl.load(x_ptr + i)"),
    (before_the_first_element, "out-of-bounds-load", "tl.load(x_ptr + i, mask=i < N)"),
    (of_memory_that_nobody_wrote, "unwritten-read", "tl.load(x_ptr + i, mask=i < N)"),
    (left_unwritten, "unwritten-read", "torch.equal"),
    (written_by_two_programs, "write-conflict", "tl.program_id(0))"),
    (read_and_written_by_two_names, "read-of-other", "(p + 1) % B"),
    (with_undefined_lanes, "undefined-lanes", "tl.max(tl.load"),
]


@pytest.mark.parametrize(
    ("program", "kind", "line"), WRONG, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_what_is_wrong_behind_an_address_is_found(
    program: Callable[[], None], kind: str, line: str
) -> None:
    with watch() as log:
        program()
    assert log.kinds[:1] == (kind,), str(log)
    place = log.findings[0].place
    assert place is not None
    assert line in linecache.getline(place.file, place.line)


def test_messages_say_whose_address_it_is() -> None:
    with watch() as log:
        of_a_freed_tensor_where_another_lies()
    assert "memory of a tensor that was freed before the launch" in log.findings[0].message
    with watch() as log:
        of_no_tensor()
    assert "an address that belongs to no tensor" in log.findings[0].message
    with watch() as log:
        one_element_too_far_in_a_store()
    assert log.findings[0].tensor == "the tensor [15] by its address"


def test_an_integer_of_32_bits_is_no_address() -> None:
    with watch() as log, pytest.raises(TypeError):
        adds_one_at[(1,)](64, 0, 5, B=8)
    assert "a pointer is made of an integer of 64 bits, and this is an int32" in str(log)


def test_memory_is_not_kept_by_its_address() -> None:
    watcher = watched.Watcher(Log())
    with watcher.running():
        x = torch.ones(3)
        memory = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
        adds_one_at[(1,)](x.data_ptr(), 0, 3, B=4)
        del x
    assert memory.expired()
    assert torch.Tensor.data_ptr is torch._C.TensorBase.data_ptr


# Functions that are checked.


def twice(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return 2 * x


def by_table(x: Any) -> Any:
    x = x.contiguous()
    z = torch.empty_like(x)
    doubled([x[:3], x[3:]], [z[:3], z[3:]])
    return z


def by_table_too_far(x: Any) -> Any:
    x = x.contiguous()
    z = torch.empty_like(x)
    doubled([x[:3], x[3:]], [z[:3], z[3:]], more=1)
    return z


def in_the_input(x: Any) -> Any:
    x = x.contiguous()
    doubled([x], [x])
    return x.clone()


def ran(function: Any) -> Run:
    subject = bound(Request(Variant(function), from_function(twice)))
    return subject.run(Trial.of(Case(subject.operation, {"N": 20}), 0))


def test_a_function_may_pass_addresses() -> None:
    run = ran(by_table)
    assert not run.crash
    assert not run.memory.findings
    assert not run.wrong.any()


def test_wrong_functions_that_pass_addresses_are_found() -> None:
    assert {one.kind for one in ran(by_table_too_far).memory.findings} >= {"out-of-bounds-load"}
    (finding,) = ran(in_the_input).memory.findings
    assert (finding.kind, finding.tensor) == ("input-written", "x")
    (finding,) = (one for one in ran(by_table_too_far).memory.findings if one.kind[-4:] == "load")
    assert "x has 20 elements" in finding.message


# A GPU's addresses are of no memory here.


def test_a_sample_of_a_gpu_stops_at_an_address() -> None:
    log = Log()
    watcher = watched.Watcher(log)
    x = torch.zeros(5)
    arguments = {"address": x.data_ptr(), "first": 0, "N": 5, "B": 8}
    with watcher.running():
        watcher.on_gpu(lambda: None, adds_one_at, (1,), arguments)
    assert not log.findings, str(log)
    assert any("a GPU's addresses" in note for note in log.notes)
