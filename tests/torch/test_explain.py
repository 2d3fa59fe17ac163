"""Which kernel is said to serve an operator is the one that does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lowbit.kernels.triton.fast import launch
from lowbit.kernels.triton.fast.launch import Gpu, choices
from lowbit.torch import explain, functional

H200, A100 = Gpu(90, 132), Gpu(80, 108)
SIZES: dict[str, Any] = {"length": 5000, "rows": 300, "head_size": 100, "channels": 64}
SIZES |= {"M": 3, "N": 4096, "K": 4096, "group_size": 128, "B": 2, "experts": 8}


@pytest.mark.parametrize("operator", choices.names())
def test_every_operator_says_what_serves_it_on_each_device(operator: str) -> None:
    for gpu in (H200, A100):
        choice = explain(operator, device=gpu, **SIZES)
        assert "_kernel" in choice.kernel or choice.refused
        assert str(choice).startswith(f"{choice.kernel}: {choice.why}")
    on_cpu = explain(operator, device="cpu", **SIZES)
    if operator == "linear":
        assert on_cpu.kernel == "lowbit's product for CPUs"
        return
    assert on_cpu.kernel == "PyTorch in float64"
    assert "on the CPU" in on_cpu.refused[-1][1]


def test_what_is_said_is_what_runs() -> None:
    """The kernels that a call launches, in the interpreter, with the configuration that is chosen
    for it."""
    started = dict[str, Any]()

    def record(kernel: Any, grid: Any, arguments: Any) -> None:
        started[kernel.__name__] = arguments

    x = torch.zeros(3, 1000)
    with launch.running(record):
        functional.softmax(x)
    interpreter = explain("softmax", device="cpu", dtype=torch.float32, length=1000)
    assert interpreter.refused[-1][0] in started
    chosen = choices.get("softmax")(launch.INTERPRETER, 1000, 4).config
    assert started["softmax_kernel"]["CHUNK"] == chosen.chunk


def test_why_a_table_does_not_serve() -> None:
    choice = explain("attention", device=A100, head_size=128, causal=True)
    assert choice.why == "fits any GPU"
    assert choice.refused[0][1].startswith("made for sm_90; says nothing of heads of 128, causal,")
    assert explain("attention", device=H200, head_size=128).refused == ()
    long = explain("softmax", device=H200, length=5000)
    assert [why for _, why in long.refused] == [
        f"the table has it for rows of up to {most}" for most in (1024, 2048, 4096)
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: explain("sofmax"),
            "no operator is called 'sofmax' .*'softmax'.*known: .*softmax",
        ),
        (lambda: explain("softmax", device=H200), "chosen by length too"),
        (
            lambda: explain("linear", device=H200, M=1, N=64, K=64, group_size=24),
            "no kernel serves it on sm_90 .*: group_size must be a multiple of 32",
        ),
        (lambda: explain("softmax", device=H200, length=2**40), "too long for this GPU"),
        (
            lambda: explain("attention", device=H200, dtype=torch.float32, head_size=64),
            "attention takes bfloat16 or float16, got elements of 4 bytes",
        ),
    ],
)
def test_what_cannot_be_explained(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
