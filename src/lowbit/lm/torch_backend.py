"""A language model on a GPU, by PyTorch: its weights as products there take them, and what runs it.

Weights of 4 bits, and of 8 without zero points, stay what they are. Others are floats of 16 bits:
there is no kernel for them yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowbit.lm.backend import Rows
from lowbit.lm.checkpoint import Checkpoint
from lowbit.lm.decoder import (
    Chunk,
    Decoder,
    DecoderLayer,
    Gated,
    Linear,
    Mixture,
    Step,
    is_fused,
)
from lowbit.lm.description import Description
from lowbit.lm.matrix_rows import Matrix, MatrixRows, scaled
from lowbit.lm.network import GatedConstants, LayerConstants, Weights, add_rotations
from lowbit.numerics.methods import QuantizedWeight
from lowbit.registry.locks import Lock
from lowbit.torch import QuantizedWeight as WeightTensor
from lowbit.torch.functional import TiledWeight, interleaved, pack_int4, pack_int8
from lowbit.torch.graphs import CapturedCalls, on_host
from lowbit.torch.weight import Facts
from lowbit.weights.format import WeightFormat

_ROWS = 2048  # of a chunk of a prompt
_GROUPS, _TILE = 32, 128  # in k: what groups are multiples of, and a whole row is filled up to
_LOADING = 4  # threads
_PLACES = 64  # what the places of a sequence are a multiple of
_CACHES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Product = Tensor | TiledWeight


def gpu(name: str) -> torch.device:
    """A GPU by its name. RuntimeError: there is none of that name."""
    device, count = torch.device(name), torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        raise RuntimeError(f"PyTorch finds no {name!r} here: it knows of {count} CUDA GPUs")
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def product(
    weight: Matrix, device: torch.device, dtype: torch.dtype, *, gated: bool = False,
    experts: int = 0,
) -> Product:  # fmt: skip
    """A weight [N, K] as it is multiplied by on a device: integers as they are, where a kernel
    takes them, else floats. gated: the rows of a gate and of what it is multiplied with. experts:
    it is that of so many, below each other; 0: of none."""

    def floats(array: npt.NDArray[Any]) -> Tensor:
        held = torch.tensor(array).to(device).to(dtype)
        return held.unflatten(0, (experts, -1)) if experts else held

    if isinstance(weight, np.ndarray):
        return floats(weight)
    q, real = weight.weight, weight.zero_point
    depth = q.shape[1]
    size = min(q.group_size or depth, depth)
    size = size if size < depth else -(-depth // _TILE) * _TILE
    wide = q.format.bits > 4
    if size % _GROUPS or (wide and (real is not None or q.zero_point.any())):
        return floats(weight.dequantize())

    def held(array: npt.NDArray[Any]) -> Tensor:
        rows = torch.tensor(array).to(device).reshape(len(q.values), -1)
        rows = rows.unflatten(0, (max(experts, 1), -1))
        if gated and rows.shape[1] % 16 == 0:
            rows = torch.stack([interleaved(*one.chunk(2)) for one in rows])
        return rows if experts else rows[0]

    values, scale = held(q.values), held(q.scale)
    half = scale.half()
    if bool((half.float() == scale).all()):  # as most files have them
        scale = half
    if wide:
        return pack_int8(values, scale, group_size=size)
    zero = held(q.zero_point if real is None else real)
    if q.format.signed:
        values, zero = (values + 8).to(torch.uint8), zero + 8
    return pack_int4(values, scale, zero, group_size=size)


class _DeviceWeights(Weights):
    """A model's tensors on a device. products: by name."""

    def __init__(
        self, checkpoint: Checkpoint, format: WeightFormat | None, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(checkpoint, "float", format)
        self._device, self._dtype = device, dtype
        self.products: dict[str, Product] = {}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """What `vector` gave the name of, for as long as nobody has asked for it."""
        value = torch.tensor(self.constants.pop(name))
        return value.to(self._device, dtype or self._dtype if value.is_floating_point() else None)

    def linear(self, weight: str, bias: str, order: str) -> Linear:
        """What `matrices` gave the names of."""
        held = self.products[weight]
        extra = [self.tensor(name) if name else None for name in (bias, order)]
        if extra[0] is not None and is_fused(held) and self._gated(weight.split("+")):
            extra[0] = interleaved(*extra[0].chunk(2))
        return Linear(held, *extra)

    def _gated(self, stems: Sequence[str]) -> bool:
        """Whether a matrix holds a gate and what it is multiplied with."""
        if any("ffn_gate_up" in one for one in stems):
            return True
        alone = len(stems) == 1 and self.has(stems[0].replace("ffn_up", "ffn_gate") + ".weight")
        return any("ffn_gate" in one or "ffn_up" in one for one in stems) and not alone

    def _packed(self, stems: Sequence[str], rows: MatrixRows, scale: float) -> str:
        name, matrix = "+".join(stems), rows.whole()
        if isinstance(matrix, np.ndarray):
            matrix = matrix * np.float32(scale)
            matrix = matrix if self.format is None else self.format.quantize(matrix)
        elif scale != 1:
            matrix = scaled(matrix, scale)
        experts = self.checkpoint.description.experts if "_exps" in name else 0
        options = {"gated": self._gated(stems), "experts": experts}
        made = self.products[name] = product(matrix, self._device, self._dtype, **options)
        if isinstance(matrix, QuantizedWeight) and isinstance(made, Tensor):
            notes, kind = self.checkpoint.notes, str(self._dtype).removeprefix("torch.")
            q = matrix.weight
            zeros = q.format.bits > 4 and (matrix.zero_point is not None or q.zero_point.any())
            what = f"in groups of {q.group_size}" if not zeros else "with zero points"
            reason = f"{q.format.bits} bits {what} as {kind}: no kernel takes them on a GPU"
            notes[reason] = notes.get(reason, 0) + q.values.size
        return name


def _gated(d: Description, weights: _DeviceWeights, gated: GatedConstants) -> Gated:
    up = [weights.linear(*names) for names in gated.up]
    return Gated(up, weights.linear(*gated.down), d.function)


def _layer(d: Description, weights: _DeviceWeights, number: int) -> DecoderLayer:
    layer = LayerConstants(d, weights, number)
    if layer.mixed:
        up, down = ([weights.products[weight] for weight, *_ in names]
                    for names in (layer.gated.up, [layer.gated.down]))  # fmt: skip
        shared = layer.shared and (
            weights.tensor(layer.shared_gate),
            _gated(d, weights, layer.shared),
        )
        gated = Mixture(d, weights.tensor(layer.router, torch.float32), up, down[0], shared)
    else:
        gated = _gated(d, weights, layer.gated)
    norms = {name: weights.tensor(held) for name, held in layer.norms.items()}
    qkv = [weights.linear(*names) for names in layer.qkv]
    return DecoderLayer(d, number, qkv, weights.linear(*layer.out), gated, norms)


def decoder(
    checkpoint: Checkpoint, format: WeightFormat | None, context: int, capacity: int,
    device: torch.device, dtype: torch.dtype,
) -> Decoder:  # fmt: skip
    """The module of a checkpoint, whose floats are quantized to a format, or stay what they are.

    context: how many positions there are to be. capacity: how many places."""
    d, weights = checkpoint.description, _DeviceWeights(checkpoint, format, device, dtype)
    add_rotations(d, weights, context, capacity)
    weights.constants.pop("no rotation", None)
    rotations = {name: weights.tensor(name, torch.float32) for name in list(weights.constants)}
    with ThreadPoolExecutor(_LOADING) as pool:  # NumPy and copies let others run
        layers = list(pool.map(partial(_layer, d, weights), range(d.layers)))
    matrix = checkpoint.matrix("token_embd.weight")
    table = _table(matrix, device, dtype)
    stem = checkpoint.layout.head
    if (
        stem == "token_embd"
        and type(table) is Tensor
        and (format is None or isinstance(matrix, QuantizedWeight))
    ):
        head = Linear(table)
    else:
        head = weights.linear(*weights.matrices([stem], [d.vocabulary], d.width)[0])
    norm = weights.tensor(weights.vector("output_norm.weight", d.width))
    return Decoder(d, table, layers, norm, head, rotations)


def _table(matrix: Matrix, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What rows are looked up in: integers, or floats where those of 8 bits are in groups."""
    if isinstance(matrix, np.ndarray):
        return torch.tensor(matrix).to(device).to(dtype)
    q = matrix.weight
    method = "nearest" if matrix.zero_point is None else "hqq"
    if q.format.bits > 4 and (q.group_size or method != "nearest" or q.zero_point.any()):
        return torch.tensor(matrix.dequantize()).to(device).to(dtype)
    (rows, depth), form = q.shape, WeightFormat(q.format.name, q.group_size, method=method)
    return WeightTensor.of(matrix, Facts(rows, depth, dtype, form, "rows"), device)


class TorchBackend:
    """A model on a device of PyTorch's: a `lowbit.lm.backend.Backend`."""

    def __init__(
        self, checkpoint: Checkpoint, format: WeightFormat | None, cache: str, slots: int,
        context: int, device: torch.device, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.slots, self._device, self._dtype = slots, device, dtype
        d = checkpoint.description
        # One place more, which rows write to that stand for no sequence.
        capacity = -(-(context + 1) // _PLACES) * _PLACES
        self._spare, self._lock = capacity - 1, Lock()
        with torch.inference_mode():
            self.decoder = decoder(checkpoint, format, context, capacity, device, dtype)
            sizes = 2, d.layers, slots, d.key_heads, capacity, d.head_dim
            # Zeros, since what is not seen is multiplied by 0.
            self._cache = torch.zeros(sizes, dtype=_CACHES[cache], device=device)
        self._calls = CapturedCalls(self._stepped, device)

    def cut(self, count: int) -> tuple[int, ...]:
        """As `Backend` says."""
        return tuple(min(_ROWS, count - at) for at in range(0, count, _ROWS))

    def chunk(self, ids: Sequence[int], first: int, slot: int, rows: int, *, last: bool) -> Rows:
        """As `Backend` says."""
        with self._lock, torch.inference_mode():
            places = [*range(first, first + rows)], [slot] * rows
            tokens, positions, slots = torch.tensor([ids, *places]).to(self._device)
            x = self.decoder(tokens, Chunk(self._cache, positions, slots, slot, first))
            return on_host((x[-1:] if last else x).float())

    def step(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Rows:
        """As `Backend` says. Rows are as many as a power of two; those that stand for no sequence
        write to the last place of a slot, which nobody reads."""
        count = len(ids)
        given = torch.zeros(3, 1 << (count - 1).bit_length(), dtype=torch.int64)
        given[1:, count:] = torch.tensor([[self._spare], [slots[-1]]])
        given[:, :count] = torch.tensor([ids, positions, slots])
        with self._lock, torch.inference_mode():
            return on_host(self._calls(given)[:count])

    def head(self, hidden: Rows) -> Rows:
        """As `Backend` says."""
        with self._lock, torch.inference_mode():
            x = torch.from_numpy(hidden).to(self._device).to(self._dtype)
            return on_host(self.decoder.logits(x))

    def copy(self, source: int, target: int, tokens: slice) -> None:
        """As `Backend` says."""
        with self._lock, torch.inference_mode():
            self._cache[:, :, target, :, tokens] = self._cache[:, :, source, :, tokens]

    def _stepped(self, given: Tensor) -> Tensor:
        """Logits of tokens at positions of slots: int64 [3, rows]."""
        ids, positions, slots = given
        return self.decoder.logits(self.decoder(ids, Step(self._cache, positions, slots)))
