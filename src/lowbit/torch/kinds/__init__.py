"""The kinds of layers that `quantize_` makes integers of, one file each, which registers itself."""

from __future__ import annotations

from lowbit.torch.kinds.kind import QuantizedModule, become_quantized, kind_of, kinds

__all__ = ["QuantizedModule", "become_quantized", "kind_of", "kinds"]
