"""Experts of a mixture: a checkpoint has a matrix for each, a model of transformers one for all.

Since version 5 transformers holds `experts.gate_up_proj`, [experts, 2 · inner, width], and
`experts.down_proj`, [experts, width, inner], and makes them of matrices by number when it loads a
checkpoint; so does `fused` here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_EXPERT = re.compile(
    r"(?P<owner>(?:.*\.)?)(?:mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_PARTS = {"gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0),
          "up_proj": ("gate_up_proj", 1), "w3": ("gate_up_proj", 1),
          "down_proj": ("down_proj", 0), "w2": ("down_proj", 0)}  # fmt: skip
# The layer that chooses experts: no nn.Linear in transformers 5, and the last to lose bits.
_ROUTER = re.compile(
    r"(?:.*\.)?(?:mlp|block_sparse_moe)\.(?:gate|router|shared_expert_gate)\.weight"
)
_OLD_ROUTER = re.compile(r"(?P<owner>(?:.*\.)?)block_sparse_moe\.gate\.weight")


class _Place(NamedTuple):
    """Where a matrix of a checkpoint lies in a model's parameter: parts of an expert are below each
    other."""

    key: str
    expert: int
    part: int


def is_router(key: str) -> bool:
    """Whether a matrix chooses experts."""
    return _ROUTER.fullmatch(key) is not None


def renamed(key: str, own: Collection[str]) -> str:
    """What a model calls a router that Mixtral's checkpoints have another name for."""
    match = _OLD_ROUTER.fullmatch(key)
    if key in own or match is None:
        return key
    new = f"{match['owner']}mlp.gate.weight"
    return new if new in own else key


def _places(keys: Collection[str], own: Collection[str]) -> Iterator[tuple[str, _Place]]:
    for key in keys:
        if key in own or (match := _EXPERT.fullmatch(key)) is None:
            continue
        parameter, part = _PARTS[match["part"]]
        whole = f"{match['owner']}mlp.experts.{parameter}"
        if whole in own:
            yield key, _Place(whole, int(match["number"]), part)


def parts_of(keys: Collection[str], own: Collection[str]) -> dict[str, list[str]]:
    """Of a model's parameters that hold all experts, the keys of a checkpoint that make them, in
    their order. ValueError: some are missing."""
    found: dict[str, dict[tuple[int, int], str]] = {}
    for key, place in _places(keys, own):
        found.setdefault(place.key, {})[place.expert, place.part] = key
    for whole, parts in found.items():
        experts = 1 + max(expert for expert, _ in parts)
        count = 2 if whole.endswith("gate_up_proj") else 1
        wanted = [(expert, part) for expert in range(experts) for part in range(count)]
        if missing := [place for place in wanted if place not in parts]:
            raise ValueError(f"of {whole!r}, expert {missing[0][0]} is missing or lacks a matrix")
    return {whole: [parts[place] for place in sorted(parts)] for whole, parts in found.items()}


def fused_shape(shapes: Mapping[str, torch.Size], keys: list[str], whole: str) -> list[int]:
    """The shape of what `fused` makes. ValueError: matrices differ."""
    first = shapes[keys[0]]
    if wrong := [key for key in keys if shapes[key] != first or len(first) != 2]:
        raise ValueError(
            f"{wrong[0]!r} is {list(shapes[wrong[0]])}, another expert's {list(first)}"
        )
    below = 2 if whole.endswith("gate_up_proj") else 1
    return [len(keys) // below, below * first[0], first[1]]


def fused(matrices: list[Tensor], whole: str) -> Tensor:
    """All experts of a parameter, [experts, rows, columns]."""
    below = 2 if whole.endswith("gate_up_proj") else 1
    stacked = torch.stack(matrices)  # [experts · below, rows, columns]
    return stacked.unflatten(0, (-1, below)).flatten(1, 2)
