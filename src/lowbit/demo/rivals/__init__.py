"""What the demo compares lowbit with: other libraries' int8, each in a process of its own.

A rival is a class in a file of this folder, which adds it to `rivals`; importing the file needs
nothing that may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.registry import Registry
from lowbit.registry.extras import absent

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.bench.models.networks.encoder import Batch, SentenceEncoder


@dataclass(frozen=True)
class Ready:
    """A quantized model. call: tokens and mask to vectors [sentences, width]. bytes_on_disk: of
    the file that it is saved as. detail: a few words for the table."""

    call: Callable[[Batch], Tensor]
    bytes_on_disk: int
    detail: str


class Rival:
    """A library that can run the encoder.

    family: what it is called in the table, where only the fastest of one family stands. packages:
    the installed ones whose versions matter; others: what it needs besides. peer: whether it comes
    with the extra `peers`.
    """

    family: str
    packages: tuple[str, ...]
    others: tuple[str, ...] = ()
    peer: bool = True

    def unavailable(self) -> str | None:
        """Why it cannot run here; None if it may. Asked outside of its process."""
        return next(filter(None, map(absent, (*self.packages, *self.others))), None)

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        """Quantize the encoder, inside of its process; `batch` is an example, `folder` is there to
        be written to."""
        raise NotImplementedError


rivals: Registry[Rival] = Registry("rival", "lowbit.demo.rivals")
