"""The kinds of layers that `quantize_` makes integers of; a new one is added to this file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import lowbit.torch.operations  # noqa: F401  # what QuantizedWeights compute
from lowbit.registry import Registry
from lowbit.torch.config import QuantizeConfig
from lowbit.torch.functional.embedding import embedding
from lowbit.torch.functional.linear import linear
from lowbit.torch.weight import QuantizedWeight
from lowbit.weights.format import WeightFormat


class QuantizedModule(nn.Module):
    """What `quantize_` turns a layer into: a class of its own for each kind. Not constructed.

    A kind says which layers it `takes`, under which names they hold their weights, and whether
    these are `transposed`, [in, out]. `multiplies`: whether they are multiplied by, or rows of them
    looked up. A layer of a kind holds QuantizedWeights, which compute what its float class says.
    """

    transposed: ClassVar[bool] = False
    multiplies: ClassVar[bool] = True

    config: QuantizeConfig
    activations: str  # the configuration's

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} is made from an nn.{name.removeprefix('Quantized')}: call "
            "lowbit.torch.quantize_(model, config)"
        )

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Whether a float layer is of this kind: of exactly that class, and not empty."""
        raise NotImplementedError

    @classmethod
    def weight_names(cls, module: nn.Module) -> tuple[str, ...]:
        """The names of the parameters that become integers."""
        return ("weight",)

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Why such a layer has to stay in float; None if it can be quantized."""
        return None

    @classmethod
    def format(cls, config: QuantizeConfig) -> WeightFormat | None:
        """What a configuration makes of the weights, where no other kind shares them."""
        return config.weight_format if cls.multiplies else config.embedding_format

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.weight_names(self):
            if not isinstance(value, QuantizedWeight):
                raise TypeError(
                    f"the weight of a {type(self).__name__} must be a QuantizedWeight, got "
                    f"{type(value).__name__}; weight.copy_(value) quantizes a float tensor into it"
                )
            # An embedding that shares its weight with a linear layer has that one's format.
            known = {self.config.weight_format.layout}
            if not self.multiplies and self.config.embedding_format:
                known.add(self.config.embedding_format.layout)
            if value.format.layout not in known:
                raise ValueError(
                    f"a layer with {self.config} takes a weight of "
                    f"{self.format(self.config)}, got one of {value.format}; "
                    f"weight.copy_(value) converts it"
                )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        before = super().extra_repr()
        return f"{before}{', ' * bool(before)}{self.config}"


kinds: Registry[type[QuantizedModule]] = Registry("kind of layer")
"""By the name of the float class."""


def kind_of(module: nn.Module) -> type[QuantizedModule] | None:
    """The kind that a layer is of, float or quantized already; None if it is of none."""
    if isinstance(module, QuantizedModule):
        return type(module)
    return next((kind for kind in kinds if kind.takes(module)), None)


def become_quantized(
    layer: nn.Module, weights: Mapping[str, nn.Parameter], config: QuantizeConfig
) -> None:
    """Make a layer one of its kind, with these weights, Parameters that are QuantizedWeights.

    The object stays the same, and with it hooks, training flag and every reference to it.
    """
    kind = kind_of(layer)
    assert kind is not None
    layer.__class__ = kind
    assert isinstance(layer, QuantizedModule)
    layer.config, layer.activations = config, config.activations
    for name, weight in weights.items():
        setattr(layer, name, weight)
    layer.__dict__.pop(STAYS, None)


STAYS = "_lowbit_stays_float"
"""The attribute of a layer in which `quantize_` leaves why it stays in float."""


@kinds.register("Linear")
class QuantizedLinear(QuantizedModule, nn.Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """What `quantize_` turns an `nn.Linear` into. It is not constructed directly.

    Input [..., in_features] of float32, bfloat16 or float16, any strides; output
    [..., out_features] of the same dtype, under autocast of autocast's. What becomes of the input
    on the way is what `config` says; the arithmetic is that of `lowbit.linear_dynamic` or
    `lowbit.linear_weight_only`.

    The weight is frozen. Gradients pass to the input and to the bias as if the layer were
    `linear(x, weight.dequantize(), bias)` (the straight-through estimator: Bengio, Léonard,
    Courville 2013, arXiv:1308.3432).
    """

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        # The second is what nn.MultiheadAttention ends with.
        known = type(module) in (nn.Linear, NonDynamicallyQuantizableLinear)
        return known and module.in_features > 0 and module.out_features > 0  # type: ignore[operator]

    def forward(self, input: Tensor) -> Tensor:
        # Straight to the dictionary: nn.Module's attribute look-up costs a microsecond here.
        parameters: Any = self._parameters
        return linear(input, parameters["weight"], parameters["bias"], self.activations)


_NAMES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@kinds.register("MultiheadAttention")
class QuantizedMultiheadAttention(QuantizedModule, nn.MultiheadAttention):
    """What `quantize_` turns an `nn.MultiheadAttention` into. Its forward is PyTorch's own.

    The projections of queries, keys and values are quantized; the one at the end is a linear layer
    of its own, `out_proj`. The products of attention itself stay in float.
    """

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return type(module) is nn.MultiheadAttention

    @classmethod
    def weight_names(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name in _NAMES if module._parameters.get(name) is not None)


@kinds.register("Conv1D")
class QuantizedConv1D(QuantizedModule):
    """What `quantize_` turns a `transformers.pytorch_utils.Conv1D` into: y = x · weight + bias.

    Input [..., nx], output [..., nf]; all else is as for QuantizedLinear.
    """

    transposed = True

    nf: int
    nx: int

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        # By name, since transformers may not be there.
        known = type(module).__module__, type(module).__qualname__
        return known == ("transformers.pytorch_utils", "Conv1D")

    def forward(self, x: Tensor) -> Tensor:
        parameters: Any = self._parameters
        return linear(x, parameters["weight"], parameters["bias"], self.activations)

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}, {self.config}"


@kinds.register("Embedding")
class QuantizedEmbedding(QuantizedModule, nn.Embedding):
    """What `quantize_` turns an `nn.Embedding` into.

    Input of int32 or int64, any shape; output [..., embedding_dim], the rows as
    `weight.dequantize()` has them. The table is frozen.
    """

    multiplies = False

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return type(module) is nn.Embedding and module.weight.numel() > 0

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if module.max_norm is not None:
            return "max_norm changes the table in every call"
        return None

    def forward(self, input: Tensor) -> Tensor:
        parameters: Any = self._parameters
        return embedding(input, parameters["weight"])
