"""torchao's dynamic int8, compiled by PyTorch's inductor where that is quick enough."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.demo.rivals import Ready, Rival, rivals

if TYPE_CHECKING:
    from lowbit.bench.models.networks.encoder import Batch, SentenceEncoder

_COMPILE_SECONDS = 60


class Torchao(Rival):
    """`Int8DynamicActivationInt8WeightConfig`."""

    family = "torchao int8"
    packages = ("torchao",)

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        import torch
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # pyright: ignore[reportMissingImports]

        quantize_(encoder, Int8DynamicActivationInt8WeightConfig())
        path = folder / "model"
        torch.save(encoder.state_dict(), path)
        model, detail = torch.compile(encoder, dynamic=True), "dynamic, compiled"
        try:
            with _at_most(_COMPILE_SECONDS):
                for count in (len(batch[0]), 1):  # a size of 1 is compiled by itself
                    model(*(one[:count] for one in batch))
        except Exception:  # not in time, or without a C++ compiler, and then for many reasons
            torch.compiler.reset()
            model, detail = encoder, "dynamic, eager"
        return Ready(lambda batch: model(*batch), path.stat().st_size, detail)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in a block that takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


rivals.add("torchao int8", Torchao())
