"""Quantized layers of Hugging Face folders, as quantized weights without a second rounding.

A layer [N, K] is a few tensors. Words are int32, and hold the first of their values in the lowest
bits; an element is scale · (q − zero).

- gptq: `qweight` [K / n, N], words of n = 32 / bits neighbours along K; `scales` [groups, N];
  `qzeros` [groups, N / n], words of neighbours along N, less 1 of each, but not in `gptq_v2`;
  `g_idx` [K], the group of each input: with act-order, neighbours are not of the same.
- awq: `qweight` [K, N / 8], `qzeros` [groups, N / 8], words of columns 0, 2, 4, 6, 1, 3, 5, 7;
  `scales` [groups, N].
- compressed-tensors: `weight_packed` [N, K / n] and `weight_shape`, or `weight` of int8 or
  float8_e4m3; `weight_scale` [N, groups], or one for each row, or one; `weight_zero_point` as the
  scales, packed along N where the weight is. What is packed is counted from −2^(bits − 1).
- bitsandbytes: `weight` of int8, `SCB`, 127 scales, of each row.
- lowbit: see weights/folder.py.

Sources: QuantLinear.pack of AutoGPTQ, convert_gptq_v1_to_v2_format_module of GPTQModel, from_linear
of AutoAWQ's WQLinear_GEMM, pack_to_int32 of compressed-tensors, int8_vectorwise_dequant of
bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.lm.blocks import as_weight
from lowbit.lm.keys import refuse, unknown
from lowbit.lm.matrix_rows import MatrixRows, forgetting
from lowbit.numerics import from_int32, quantize
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights import folder
from lowbit.weights.tensor_file import StoredTensor, forget

Array = npt.NDArray[Any]
Config = Mapping[str, Any]

_FLOATS = "float16", "bfloat16", "float32"
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of its columns
_TOGETHER = 64  # rows that are looked at together
_COMPRESSED = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"


@dataclass(frozen=True)
class Layer:
    """A quantized layer: its name, its tensors by their names behind that, `quantization_config`,
    what reads them, elements that were rounded once more, by reason, of all layers, and the names
    of tensors that are read."""

    name: str
    tensors: Mapping[str, StoredTensor]
    config: Config
    read: Callable[[Layer], MatrixRows]
    notes: dict[str, int]
    read_parts: tuple[str, ...] = ()

    def weight(self) -> QuantizedWeight:
        """The weight [N, K]; its columns stand for the inputs x[order], if there is an `order`.

        ValueError names the tensor that is missing or does not fit."""
        whole = self.reader().whole()
        assert isinstance(whole, QuantizedWeight)
        return whole

    def reader(self) -> MatrixRows:
        """What reads rows of the `weight`; both raise what that does."""
        with self._named():
            reader = self.read(self)

        def read(which: slice) -> QuantizedWeight | Array:
            with self._named():
                return reader.read(which)

        return replace(reader, read=read)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """The order of inputs in which those of a group are neighbours, [K]; None: they are."""
        if folder.ORDER in self.tensors:
            order = self.part(folder.ORDER, ["int64"], -1)
            if (np.sort(order) != np.arange(len(order))).any():
                raise ValueError(f"{self.name}: {folder.ORDER} must name each input once")
            return order
        groups = self.tensors[self.groups].numpy() if self.groups else np.zeros(0)
        return np.argsort(groups, kind="stable") if (groups[1:] < groups[:-1]).any() else None

    @property
    def groups(self) -> str:
        """The tensor with the group of each input; "": neighbours are of one."""
        return next((name for name in ("g_idx", "weight_g_idx") if name in self.tensors), "")

    def part(self, name: str, dtypes: Collection[str], *shape: int) -> Array:
        """A tensor of one of these dtypes and of this shape, in which −1 stands for any size."""
        held = {name: self.tensors[name].numpy()} if name in self.tensors else {}
        return folder.part(held, name, dtypes, *shape)

    @property
    def in_rows(self) -> bool:
        """Whether all tensors are rows, of which `rows` can read some."""
        return folder.VALUES in self.tensors

    def rows(self, which: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Some rows of the weight."""
        return folder.rows(self.of_lowbit(), which)

    def of_lowbit(self) -> dict[str, Array]:
        """The tensors of weights/folder.py."""
        names = (name for name in folder.NAMES if name in self.tensors)
        return {name: self.tensors[name].numpy() for name in names}

    def in_order(self, depth: int, size: int) -> Callable[[Array], Array]:
        """What brings the columns of values [rows, K] in `order`. ValueError: groups have not
        `size` each."""
        if not self.groups:
            return lambda q: q
        order = self.order
        groups = self.part(self.groups, ("int32", "int64"), depth)
        sorted_groups = groups if order is None else groups[order]
        if (sorted_groups != np.arange(depth) // size).any():
            raise ValueError(f"{self.groups} must give {size} inputs to each group")
        return lambda q: q if order is None else q[:, order]


def _gptq(layer: Layer) -> MatrixRows:
    bits = layer.config["bits"]
    words = layer.part("qweight", ["int32"], -1, -1)
    depth, columns = len(words) * 32 // bits, words.shape[1]
    size, groups = _grouped(layer.config, depth)
    scale = layer.part("scales", _FLOATS, groups, columns)
    zeros = layer.part("qzeros", ["int32"], groups, -(-columns * bits // 32))
    if _gptq_format(layer.config) == "gptq":  # of whole words, which 0 borrows from
        zeros = zeros + np.int32(0x11111111 if bits == 4 else 0x01010101)
    zero = _unpacked(zeros, bits, 1, columns)
    in_order = layer.in_order(depth, size)

    def read(which: slice) -> QuantizedWeight:
        q = _unpacked(words[:, which], bits, 0, depth).T
        return as_weight(in_order(q), scale.T[which], zero.T[which], bits, size)

    return _by_columns((columns, depth), read, words)


def _by_columns(
    shape: tuple[int, int], read: Callable[[slice], QuantizedWeight], words: Array
) -> MatrixRows:
    """What reads rows of a weight that is stored by columns: each is on all of its pages."""

    def forget_all(which: slice) -> None:
        if which.stop == shape[0]:  # the last ones, when all have been read
            forget(words)

    return MatrixRows(shape, read, forget=forget_all, whole_bytes=words.nbytes)


def _awq(layer: Layer) -> MatrixRows:
    words = layer.part("qweight", ["int32"], -1, -1)
    depth, columns = len(words), words.shape[1] * 8
    size, groups = _grouped(layer.config, depth)
    scale = layer.part("scales", _FLOATS, groups, columns)
    zeros = layer.part("qzeros", ["int32"], groups, words.shape[1])
    zero = _awq_values(zeros)
    in_order = layer.in_order(depth, size)

    def read(which: slice) -> QuantizedWeight:
        first = which.start // 8
        begin = which.start - 8 * first
        q = _awq_values(words[:, first : -(-which.stop // 8)])
        q = q[:, begin : begin + which.stop - which.start].T
        return as_weight(in_order(q), scale.T[which], zero.T[which], 4, size)

    return _by_columns((columns, depth), read, words)


def _awq_values(words: Array) -> Array:
    """The values of words along the second axis, uint8."""
    values = from_int32(words, 1).reshape(len(words), -1, 8)[..., _AWQ_PLACES]
    return values.reshape(len(words), -1)


def _compressed(layer: Layer) -> MatrixRows:
    if packed := "weight_packed" in layer.tensors:
        words = layer.part("weight_packed", ["int32"], -1, -1)
        shape = layer.part("weight_shape", ("int64", "int32"), 2).tolist()
        bits = next((n for n in (4, 8) if -(-shape[1] * n // 32) == words.shape[1]), 0)
        if not bits or shape[0] != len(words):
            raise ValueError(f"weight_shape {shape} does not fit {list(words.shape)} words")
        source = words
        rows, depth = shape
    else:
        source = layer.part("weight", ("int8", "float8_e4m3fn"), -1, -1)
        bits = 8
        rows, depth = source.shape
    scale = _by_rows(layer, "weight_scale", _FLOATS, rows)
    groups = scale.shape[1]
    if depth % groups:
        raise ValueError(f"weight_scale {list(scale.shape)} does not fit {depth} inputs")
    size = depth // groups
    in_order = layer.in_order(depth, size)
    if source.dtype.name == "float8_e4m3fn":
        return _rounded(layer, source, scale, in_order)
    if not packed and groups > 1 and _holds_four_bits(source):
        bits = 4  # where activations are to be quantized too
    name = "weight_zero_point"
    if name not in layer.tensors:
        zero = np.full(scale.shape, 1 << bits - 1, np.uint8)
    elif layer.tensors[name].dtype == "I32":
        words = layer.part(name, ["int32"], -(-rows * bits // 32), groups)
        zero = _unpacked(words, bits, 0, rows)
    else:
        zero = _unsigned(_by_rows(layer, name, ["int8"], rows), bits)

    def read(which: slice) -> QuantizedWeight:
        stored = source[which]
        q = _unpacked(stored, bits, 1, depth) if packed else _unsigned(stored, bits)
        return as_weight(in_order(q), scale[which], zero[which], bits, size)

    return MatrixRows((rows, depth), read, forget=forgetting(source))


def _holds_four_bits(values: Array) -> bool:
    """Whether int8 [N, K] holds integers of 4 bits."""
    for first in range(0, len(values), _TOGETHER):
        part = values[first : first + _TOGETHER]
        if part.min() < -8 or part.max() > 7:
            return False
        forget(part)
    return True


def _rounded(
    layer: Layer, source: Array, scale: Array, in_order: Callable[[Array], Array]
) -> MatrixRows:
    """Floats of 8 bits as integers of 8 bits: the least that kernels lose."""
    rows, depth = source.shape
    size = depth // scale.shape[1]
    squares = np.full((2, rows), np.nan)  # of errors and of values, of each row that was read

    def read(which: slice) -> QuantizedWeight:
        values = in_order(source[which]).astype(np.float32) * np.repeat(scale[which], size, 1)
        weight = QuantizedWeight(quantize(values, "int8", axis=0))
        for of_rows, array in zip(squares, (weight.dequantize() - values, values), strict=True):
            of_rows[which] = np.einsum("nk,nk->n", array, array, dtype=np.float64)
        if not np.isnan(squares).any():
            error, norm = np.sqrt(squares.sum(1))
            squares[:] = np.nan
            reason = (
                "float8 rounded to int8, a scale for each row: "
                f"relative error {error / max(norm, 1e-30):.1%}"
            )
            layer.notes[reason] = layer.notes.get(reason, 0) + source.size
        return weight

    return MatrixRows(source.shape, read, forget=forgetting(source))


def _bitsandbytes(layer: Layer) -> MatrixRows:
    if "weight_format" in layer.tensors and layer.tensors["weight_format"].numpy().any():
        raise NotImplementedError(f"{layer.name}: weight_format must be 0, which is rows")
    q = layer.part("weight", ["int8"], -1, -1)
    scale = layer.part("SCB", ["float32"], len(q))[:, None] / np.float32(127)
    zero = np.full(scale.shape, 128, np.uint8)
    in_order = layer.in_order(q.shape[1], q.shape[1])

    def read(which: slice) -> QuantizedWeight:
        return as_weight(in_order(_unsigned(q[which], 8)), scale[which], zero[which], 8, q.shape[1])

    return MatrixRows(q.shape, read, forget=forgetting(q))


def _lowbit(layer: Layer) -> MatrixRows:
    tensors = layer.of_lowbit()
    if folder.from_tensors(tensors, slice(0, 1)).input_scale is not None:
        raise NotImplementedError(f"{layer.name}: inputs that are divided are not served")
    rows, depth, _ = (int(n) for n in folder.part(tensors, folder.SIZES, ["int64"], 3))
    in_rows = [tensors[name] for name in (folder.VALUES, folder.SCALE) if name in tensors]
    return MatrixRows(
        (rows, depth),
        lambda which: folder.from_tensors(tensors, which),
        forget=forgetting(*in_rows),
    )


def _by_rows(layer: Layer, name: str, dtypes: Collection[str], rows: int) -> Array:
    """Numbers [N, groups], of which a file may have one for each row, or one."""
    shape = layer.tensors[name].shape if name in layer.tensors else (-1,)
    if shape in ((), (1,), (1, 1)):
        return np.broadcast_to(layer.part(name, dtypes, *shape).reshape(1, 1), (rows, 1))
    return layer.part(name, dtypes, rows, *(-1,) * (len(shape) > 1)).reshape(rows, -1)


def _unsigned(values: Array, bits: int) -> Array:
    """int8 counted from −2^(bits − 1), uint8."""
    return values.view(np.uint8) + np.uint8(1 << bits - 1)


def _unpacked(words: Array, bits: int, axis: int, length: int) -> Array:
    """Values of words along an axis, uint8. The axis of words lies last in memory, or they do."""
    if bits == 4:
        return from_int32(words, axis, length)
    data = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if axis:
        return data.reshape(len(words), -1)[:, :length]
    return data.transpose(0, 2, 1).reshape(-1, words.shape[1])[:length]


def _grouped(config: Config, depth: int) -> tuple[int, int]:
    """How many inputs are in a group, and how many groups there are."""
    size = config.get("group_size", 128)
    size = depth if size == -1 else min(size, depth)
    return size, -(-depth // size)


def _gptq_format(config: Config) -> Any:
    return config.get("checkpoint_format") or config.get("format") or "gptq"


def _served(what: str, value: Any, known: Collection[Any]) -> None:
    """NotImplementedError: a value that is not among those that are read."""
    if value not in known:
        raise NotImplementedError(
            f"quantized weights with {what} {value!r} are not read; read are "
            f"{', '.join(map(repr, known))}"
        )


def _check_words(config: Config, bits: Collection[int]) -> None:
    _served("bits", config.get("bits"), bits)
    size = config.get("group_size", 128)
    if type(size) is not int or not (size == -1 or size > 0):
        raise ValueError(f"group_size must be positive or -1, got {size!r}")


def _check_gptq(config: Config) -> None:
    _check_words(config, (4, 8))
    _served("checkpoint_format", _gptq_format(config), ("gptq", "gptq_v2"))
    own = [rule for rule in config.get("dynamic") or () if not rule.startswith("-:")]
    _served("dynamic", own, [[]])


def _check_awq(config: Config) -> None:
    _check_words(config, (4,))
    version = config.get("version") or config.get("checkpoint_format") or config.get("format")
    _served("version", str(version or "gemm").lower(), ("gemm",))


def _check_compressed(config: Config) -> None:
    _served("quantization_status", config.get("quantization_status", "compressed"), ["compressed"])
    _served("transform_config", config.get("transform_config") or None, [None])
    _served("sparsity_config", (config.get("sparsity_config") or {}).get("format"), [None, "dense"])
    _served("format", config.get("format"), (*_COMPRESSED, "mixed-precision"))
    groups = (config.get("config_groups") or {}).values()
    for group in (group for group in groups if not isinstance(group, list)):  # names a preset
        _served("format", group.get("format") or config.get("format"), _COMPRESSED)
        if (weights := group.get("weights")) is None:
            continue
        kind = weights.get("type", "int"), weights.get("num_bits", 8)
        _served("type and num_bits", kind, (("int", 4), ("int", 8), ("float", 8)))
        _served("strategy", weights.get("strategy"), ("group", "channel", "tensor", None))


def _check_bitsandbytes(config: Config) -> None:
    if config.get("load_in_8bit"):
        return
    kind = config.get("bnb_4bit_quant_type", "fp4")
    what = (
        f"of 4 bits ({kind})" if config.get("load_in_4bit") else "of another kind than load_in_8bit"
    )
    raise NotImplementedError(
        f"quantized weights of bitsandbytes {what} are not read; read are those of load_in_8bit"
    )


def _check_lowbit(config: Config) -> None:
    _served(
        "format_version", config.get("format_version"), (folder.VERSION, folder.ORDERED_VERSION)
    )


class Format(NamedTuple):
    """What refuses a configuration, which tensors only a quantized layer has, what reads it, which
    tensors that reads, and an expression for keys of `quantization_config` that are read or that
    change nothing: tensors say it, or it is of how they were made."""

    check: Callable[[Config], None]
    marks: tuple[str, ...]
    read: Callable[[Layer], MatrixRows]
    parts: tuple[str, ...]
    keys: str


_OF_WORDS = (
    r"bits|group_size|checkpoint_format|format|desc_act|sym|zero_point|lm_head|pack_dtype|meta"
    r"|quantizer|method|damp\w*|static_groups|true_sequential|dataset|tokenizer|model_name_or_path"
    r"|model_file_base_name|model_seqlen|block_name_to_quantize|modules_in_block_to_quantize"
    r"|module_name_preceding_first_block|modules_to_not_convert|batch_size|pad_token_id|backend"
    r"|(use|disable)_\w+|exllama_config|max_input_length|cache_block_outputs|do_fuse"
    r"|fuse_max_seq_len|modules_to_fuse|act_group_aware|mse|offload_\w+"
)
FORMATS = {
    "gptq": Format(
        _check_gptq, ("qweight",), _gptq, ("qweight", "qzeros", "scales", "g_idx"),
        rf"{_OF_WORDS}|dynamic",
    ),
    "awq": Format(
        _check_awq, ("qweight",), _awq, ("qweight", "qzeros", "scales"), rf"{_OF_WORDS}|version"
    ),
    "compressed-tensors": Format(
        _check_compressed, ("weight_packed", "weight_scale"), _compressed,
        ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point",
         "weight_g_idx"),
        r"quantization_status|transform_config|sparsity_config|format|config_groups|ignore"
        r"|kv_cache_scheme|global_compression_ratio|version|run_compressed",
    ),
    "bitsandbytes": Format(
        _check_bitsandbytes, ("SCB",), _bitsandbytes, ("weight", "SCB", "weight_format"),
        r"_?load_in_[48]bit|bnb_4bit_\w+|llm_int8_\w+",
    ),
    "lowbit": Format(
        _check_lowbit, (folder.VALUES,), _lowbit, (*folder.NAMES, folder.ORDER),
        r".*",  # each weight says by itself what it is
    ),
}  # fmt: skip
"""By `quant_method`."""


def check(config: Config) -> None:
    """Of `quantization_config`, which may be empty. NotImplementedError names what is not read;
    ValueError: it is wrong."""
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be an object, got {config!r:.40}")
    if config:
        _served("quant_method", _method(config), FORMATS)
        layout = FORMATS[_method(config)]
        layout.check(config)
        rest = {key: config[key] for key in config if not re.fullmatch(layout.keys, key)}
        rest.pop("quant_method", None)
        refuse("quantization_config", unknown(rest, ()))


def layers_of(
    config: Config, tensors: Mapping[str, StoredTensor], notes: dict[str, int]
) -> dict[str, Layer]:
    """The layers that are quantized, by name: all but those that a folder holds as floats."""
    if not config:
        return {}
    layout = FORMATS[_method(config)]
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        parts.setdefault(stem, {})[part] = tensor
    return {
        stem: Layer(stem, own, config, layout.read, notes, layout.parts)
        for stem, own in parts.items()
        if not own.keys().isdisjoint(layout.marks)
    }


def _method(config: Config) -> Any:
    return config.get("quant_method") or ("bitsandbytes" if "load_in_8bit" in config else None)
