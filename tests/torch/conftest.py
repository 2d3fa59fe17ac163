from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    quantize_,
)

# One of each kind; groups that divide none of the sizes, or of one channel.
CONFIGS = [
    Int8DynamicConfig(),
    Int4WeightOnlyConfig(group_size=16),
    Int4DynamicConfig(group_size=None, symmetric_weight=True),
]


class Encoder(nn.Module):
    """A float model with all that matters here: embedding, tied linears, norm, buffer, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 40)
        self.first = nn.Linear(40, 70)
        self.second = nn.Linear(70, 40, bias=False)
        self.norm = nn.LayerNorm(40)
        self.head = nn.Linear(40, 23)
        self.register_buffer("offset", torch.arange(40, dtype=torch.float32) / 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.get_buffer("offset")
        hidden = self.norm(hidden + self.second(torch.relu(self.first(hidden))))
        return self.head(hidden)


@pytest.fixture
def float_model() -> Encoder:
    torch.manual_seed(7)
    return Encoder().eval()


@pytest.fixture(params=CONFIGS, ids=lambda config: config.kind)
def config(request: pytest.FixtureRequest) -> QuantizeConfig:
    """What tests that take `model` or this are run with, one after the other."""
    return request.param


@pytest.fixture
def model(float_model: Encoder, config: QuantizeConfig) -> Encoder:
    """`float_model`, quantized."""
    return quantize_(copy.deepcopy(float_model), config)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.arange(21).reshape(3, 7) % 23
