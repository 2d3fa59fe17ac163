"""Programs that launch right kernels in unusual ways: nothing is to be found."""

# Triton's own annotations do not know what launches a kernel, and with what.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowbit.kernels.triton.fast.launch import launch


@triton.jit
def adds_one(x_ptr, z_ptr, N, stride, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i * stride, mask=i < N)
    tl.store(z_ptr + i, x + 1, mask=i < N)


def a_view_with_gaps() -> None:
    x, z = torch.arange(40.0)[3::2], torch.empty(19)
    adds_one[(2,)](x, z, 19, 2, B=16)
    assert torch.equal(z, x + 1)


def an_expanded_row() -> None:
    x, z = torch.ones(1).expand(5), torch.empty(5)
    adds_one[(1,)](x, z, 5, 0, B=8)
    assert torch.equal(z, x + 1)


def in_place_and_again() -> None:
    x = torch.zeros(20)
    for _ in range(3):
        adds_one[(2,)](x, x, 20, 1, B=16)
    assert torch.equal(x, torch.full((20,), 3.0))


def parts_of_one_memory() -> None:
    whole = torch.zeros(3, 16)
    adds_one[(2,)](whole[0], whole[1], 16, 1, B=8)
    adds_one[(2,)](whole[1], whole[2], 16, 1, B=8)
    assert whole.sum(1).tolist() == [0, 16, 32]


def nothing_to_launch() -> None:
    adds_one[(0,)](torch.empty(0), torch.empty(0), 0, 1, B=8)


def by_lowbit() -> None:
    x, z = torch.zeros(8), torch.empty(8)
    launch(adds_one, (1,), {"x_ptr": x, "z_ptr": z, "N": 8, "stride": 1, "B": 8})
    assert z.sum() == 8


def as_other_bits() -> None:
    x = torch.zeros(8)
    adds_one[(1,)](triton.reinterpret(x, tl.int32), x.view(torch.int32), 8, 1, B=8)
    assert x.view(torch.int32).tolist() == [1] * 8


@triton.jit
def first_of_two(pointers, z_ptr):
    tl.store(z_ptr, tl.load(pointers[0]) + tl.load(pointers[1]))


def a_tuple_of_tensors() -> None:
    z = torch.empty(1)
    first_of_two[(1,)]((torch.ones(1), torch.full((1,), 2.0)), z)
    assert z.item() == 3


def _widens(arguments: dict) -> None:
    arguments["z_ptr"].zero_()


@triton.autotune(
    [triton.Config({"B": 8}, pre_hook=_widens), triton.Config({"B": 32})],
    key=["N"],
    prune_configs_by={"early_config_prune": lambda configs, named, **_: configs[: named["N"] // 8]},
)
@triton.heuristics({"even": lambda arguments: arguments["N"] % arguments["B"] == 0})
@triton.jit
def adds_up(x_ptr, z_ptr, N, B: tl.constexpr, even: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i) if even else tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.atomic_add(z_ptr, tl.sum(x, axis=0))


def autotuned() -> None:
    z = torch.empty(1)
    adds_up[lambda meta: (triton.cdiv(8, meta["B"]),)](torch.ones(8), z, 8)
    assert (z.item(), adds_up.best_config.kwargs) == (8, {"B": 8})


def asked_for_compiled() -> None:
    x, z = torch.zeros(8), torch.empty(8)
    compiled = adds_one.warmup(x, z, 8, 1, B=8, grid=(1,))
    compiled._init_handles()
    assert compiled.n_regs > 0
    compiled[(1, 1, 1)](x, z, 8, 1, 8)
    assert z.sum() == 8


class _AddOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        z = torch.empty_like(x)
        adds_one[(1,)](x, z, x.numel(), 1, B=16)
        return z

    @staticmethod
    def backward(ctx, *grads):
        z = torch.empty_like(grads[0])
        adds_one[(1,)](grads[0], z, z.numel(), 1, B=16)
        return z


def backward() -> None:
    x = torch.zeros(12, requires_grad=True)
    (2 * _AddOne.apply(x)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3] * 12


def on_a_gpu_that_is_not_there() -> None:
    x = torch.zeros(8, device="cuda")
    z = torch.empty_like(x, device=torch.device("cuda", 0))
    assert torch.cuda.is_available()
    assert z.is_cuda
    assert x.device == z.device == triton.runtime.driver.active.get_active_torch_device()
    with torch.cuda.device(x.device):
        adds_one[(1,)](x, z, 8, 1, B=8)
    torch.cuda.synchronize()
    assert torch.nn.Linear(8, 1).cuda().to("cuda:0")(z).device.type == "cuda"
    driver: Any = triton.runtime.driver.active
    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert driver.utils.get_device_properties(0)["multiprocessor_count"] == count
    times: Any = triton.testing.do_bench(lambda: z.add_(1), quantiles=[0.5, 0.2])
    assert min(times) >= 0
    assert z.cpu().numpy().sum() == 16


RIGHT = [
    a_view_with_gaps, an_expanded_row, in_place_and_again, parts_of_one_memory, nothing_to_launch,
    by_lowbit, as_other_bits, a_tuple_of_tensors, autotuned, asked_for_compiled, backward,
    on_a_gpu_that_is_not_there,
]  # fmt: skip
