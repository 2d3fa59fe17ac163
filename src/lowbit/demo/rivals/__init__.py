"""What the demo compares lowbit with: other libraries' int8, each in a process of its own.

A rival is a class with the decorator `rivals.register`, in a file of this folder; importing the
file needs nothing that may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lowbit.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.demo.encoder import Batch, SentenceEncoder


@dataclass(frozen=True)
class Ready:
    """A quantized model. call: tokens and mask to vectors [sentences, width]. bytes_on_disk: of
    the file that it is saved as. detail: a few words for the table."""

    call: Callable[[Batch], Tensor]
    bytes_on_disk: int
    detail: str


class Rival(Protocol):
    """A library that can run the encoder.

    family: what it is called in the table, where only the fastest of one family stands. packages:
    the installed ones whose versions matter. peer: whether it comes with the extra `peers`.
    """

    family: str
    packages: tuple[str, ...]
    peer: bool

    def unavailable(self) -> str | None:
        """Why it cannot run here; None if it may. Asked outside of its process."""
        ...

    def prepare(self, encoder: SentenceEncoder, batch: Batch, threads: int, folder: Path) -> Ready:
        """Quantize the encoder, inside of its process; `batch` is an example, `folder` is there to
        be written to."""
        ...


rivals: Registry[Rival] = Registry("rival", "lowbit.demo.rivals")
