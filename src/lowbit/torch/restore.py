"""Buffers of a model on "meta" that belong to no state_dict: tables that its class computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def restore_buffers(
    model: nn.Module, stored: Mapping[str, Tensor], device: torch.device | str
) -> dict[str, Tensor]:
    """Values for the model's buffers that are on "meta" and belong to no state_dict.

    They are those of the file, where it has them, or what the model's own initialization gives, as
    transformers' models have it. ValueError: neither is there.
    """
    state = model.state_dict(keep_vars=True)
    needed = {n: b for n, b in model.named_buffers() if b.is_meta and n not in state}
    found = {n: stored[n] for n in needed if n in stored and stored[n].shape == needed[n].shape}
    for owner in {name.rpartition(".")[0] for name in needed if name not in found}:
        found |= _computed(model, owner)
    if missing := [name for name in needed if name not in found]:
        raise ValueError(
            f"the buffers {', '.join(map(repr, missing[:5]))} are on 'meta' and in no file: set "
            "them before load, or make the model outside of torch.device('meta')"
        )
    return found


def _computed(model: nn.Module, name: str) -> dict[str, Tensor]:
    """The buffers of a module without parameters, as `_init_weights` of a model above sets them."""
    module = model.get_submodule(name)
    parents = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
    above = (model.get_submodule(one) for one in (*parents, ""))
    initialize: Any = next((m._init_weights for m in above if hasattr(m, "_init_weights")), None)
    if initialize is None or module._parameters:
        return {}
    kept = dict(module._buffers)
    # What is never set shows, since it stays as it is here.
    unset = {n: _unset(one) for n, one in kept.items() if one is not None}
    try:
        module._buffers.update({n: one.clone() for n, one in unset.items()})
        with torch.no_grad():
            initialize(module)
        made = {n: one for n, one in module._buffers.items() if one is not None}
    finally:
        module._buffers.clear()
        module._buffers.update(kept)
    prefix = f"{name}." if name else ""
    return {
        f"{prefix}{n}": one
        for n, one in made.items()
        if not one.is_meta and not torch.equal(one.nan_to_num(-7.0), unset[n].nan_to_num(-7.0))
    }


def _unset(tensor: Tensor) -> Tensor:
    unlikely = float("nan") if tensor.is_floating_point() else -1
    return torch.full(tensor.shape, unlikely, dtype=tensor.dtype, device="cpu")
