"""PyTorch's own dynamic int8, on each of its engines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.demo.rivals import Ready, Rival, rivals

if TYPE_CHECKING:
    from lowbit.bench.models.networks.encoder import Batch, SentenceEncoder

_DEPRECATED = ("torch.ao.quantization is", "TypedStorage is", "torch.quantize_per_")


class TorchInt8(Rival):
    """Weights get a scale per output channel, as lowbit's do: as fast as PyTorch's default of one
    scale per weight, and closer to the float model."""

    family = "PyTorch int8"
    packages = ("torch",)
    peer = False

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def unavailable(self) -> str | None:
        import torch

        engines = torch.backends.quantized.supported_engines
        return None if self.engine in engines else "this PyTorch was built without it"

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        import torch
        from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

        torch.backends.quantized.engine = self.engine
        with warnings.catch_warnings():
            for text in _DEPRECATED:
                warnings.filterwarnings("ignore", message=f"{text}.*deprecated")
            scheme = {torch.nn.Linear: per_channel_dynamic_qconfig}
            model = torch.ao.quantization.quantize_dynamic(encoder, scheme, dtype=torch.qint8)
        path = folder / "model"
        torch.save(model.state_dict(), path)  # its packed weights know no other format
        return Ready(lambda batch: model(*batch), path.stat().st_size, f"dynamic, {self.engine}")


# qnnpack is made for phones; elsewhere it is no rival.
for _engine in ("x86", "fbgemm", "onednn"):
    rivals.add(f"PyTorch int8 {_engine}", TorchInt8(_engine))
