"""PyTorch: float32, bfloat16, and its own int8."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowbit.bench.models.model import Array, models
from lowbit.bench.networks.engine import CALIBRATION, Engine, Opened, Work, engines

if TYPE_CHECKING:
    from torch import nn


class PyTorch(Engine):
    """A model as it is built, run eagerly."""

    needs = ("torch",)
    package = ("torch", "torch")

    def __init__(self, name: str, change: Change, config: str = "", always: bool = False) -> None:
        self.name, self.change, self.config, self.always = name, change, config, always

    def open(self, work: Work) -> Opened:
        import torch

        torch.set_num_threads(work.threads)
        built = models.get(work.model).build(work.weights, for_speed=True)
        if not isinstance(built, torch.nn.Module):
            raise ValueError(f"{work.model} comes as an ONNX file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its quantization is deprecated, and says so often
            network = self.change(built, work)

        def call(*arrays: Array) -> Array:
            with torch.inference_mode():
                return network(*map(torch.from_numpy, arrays)).float().numpy()

        return Opened(call)


Change = Callable[["nn.Module", Work], Callable[..., Any]]


def _float32(network: nn.Module, work: Work) -> Callable[..., Any]:
    return network


def _bfloat16(network: nn.Module, work: Work) -> Callable[..., Any]:
    import torch

    network = network.to(torch.bfloat16)

    def call(*tensors: Any) -> Any:
        floats = (one.bfloat16() if one.is_floating_point() else one for one in tensors)
        return network(*floats)

    return call


def _x86(network: nn.Module, work: Work) -> Callable[..., Any]:
    """Static, by the engine x86."""
    import torch
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    tensors = tuple(torch.from_numpy(one) for one in work.arrays(CALIBRATION))
    prepared = prepare_fx(network, get_default_qconfig_mapping("x86"), tensors)
    with torch.inference_mode():
        for index in range(len(tensors[0])):
            prepared(*(one[index : index + 1] for one in tensors))
    return convert_fx(prepared)


def _dynamic(engine: str) -> Change:
    def change(network: nn.Module, work: Work) -> Callable[..., Any]:
        import torch
        from torch.ao.quantization import quantize_dynamic
        from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

        torch.backends.quantized.engine = engine
        scheme = {torch.nn.Linear: per_channel_dynamic_qconfig}
        return quantize_dynamic(network, scheme, dtype=torch.qint8)

    return change


for _one in (
    PyTorch("torch fp32", _float32, always=True),
    PyTorch("torch bf16", _bfloat16),
    PyTorch("torch int8 x86", _x86, "static"),
    PyTorch("torch dynamic onednn", _dynamic("onednn"), "dynamic"),
    PyTorch("torch dynamic fbgemm", _dynamic("fbgemm"), "dynamic"),
):
    engines.add(_one.name, _one)
