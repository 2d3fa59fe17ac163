"""An operation, stated once, with everything that follows from the statement."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.numerics.formats import longest_sum
from lowbit.registry.locks import cached_property
from lowbit.spec.data import Draw
from lowbit.spec.dtypes import DTYPES, Array, DType
from lowbit.spec.post_ops import OPERANDS, applied

if TYPE_CHECKING:
    from lowbit.spec.case import Case

Sizes = Mapping[str, int]
Block = int | Callable[[Sizes], int]

TERM = re.compile(r"[A-Za-z_]\w*|\d+|//|[()+*-]")


def evaluate(expression: int | str, names: Mapping[str, Any]) -> int:
    """A dimension, or another expression of sizes. Its maker has looked at each term: only names,
    numbers and arithmetic get here. KeyError or NameError if a name is missing."""
    return int(eval(str(expression), {"__builtins__": {}}, dict(names)))


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class TensorType:
    """An input or the result: its name, dtype (a key of DTYPES) and dimensions.

    variable: where the annotation leaves the dtype open, what it is called; all tensors of one
    variable have the same dtype. optional: whether the input may be left out.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    variable: str = ""
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{' '.join(self.dims)}]"

    @property
    def format(self) -> DType:
        """Everything about the dtype."""
        return DTYPES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        return self.dtype in DTYPES and self.format.is_float

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes that the dimensions are made of, in order of appearance."""
        found = (t for dim in self.dims for t in TERM.findall(dim) if t.isidentifier())
        return tuple(dict.fromkeys(found))

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape at these sizes. NameError if one is missing."""
        return tuple(evaluate(dim, sizes) for dim in self.dims)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """An operation as its annotated function states it, with a choice of what that leaves open.

    stated: the inputs and, last, the result, as annotated. choices: the dtypes of each variable.
    dtypes, static, without: what is chosen of them, the values of static parameters, the inputs
    that are left out. origin: the operation as it was stated, None if this is it.

    exercise: the sizes of the exercise. summed: dimensions that are summed over although they may
    be in the result (a softmax does). multiple_of, at_most: what sizes must be multiples of, and
    may be at most; numbers, or static parameters. blocks: what a block size of a kernel is when
    nobody says, as a number or from the sizes. special: whether a result has to be infinite or NaN
    exactly where that of the reference is. operations: how many additions and multiplications it
    takes, an expression of sizes and static parameters; of factors it is known, and else one for
    each point of the space of all sizes.

    tried: the values that static parameters are tried with; a switch is tried both ways. post_ops:
    whether steps may follow (spec/post_ops.py), which are a static parameter then and have inputs
    of their own; a result of 8 bits is quantized by them.

    factors: the inputs that are multiplied and summed. accumulator: the dtype of the sums; that of
    an integer bounds their length. multiplied_as: the dtype in which a factor is multiplied, when
    that is not its own (an activation that is quantized inside). shifted_by: the input that is the
    zero point taken from a factor first, or the factor itself if that is made inside.

    budget: how far a kernel may be from the reference in float32, before its result is rounded to
    a shorter dtype; a function of the case and of the inputs. slack: where there is no such bound
    and perturbation finds it, what the error may be besides. ideal: the result had nothing been
    quantized inside. draws: how data are made for an input, where any will not do. ranges: of an
    input of integers, the least value and one more than the largest: numbers, or expressions of
    sizes and static parameters. excludes: kinds of data that it is not tried with. at_least: the
    smallest that a size may be, 1 unless it says 0. sized: the sizes that the reference is given,
    by name. tf32: whether factors of float32 may be rounded to TF32, as tl.dot does by default.

    A function that returns several tensors states an operation for each: others: of the first, the
    further ones; part: which of them this is, None where there is one; beside: the other results.
    """

    name: str
    doc: str
    reference: Callable[..., Array]
    stated: tuple[TensorType, ...]
    choices: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, str]
    static: Mapping[str, Any]
    without: frozenset[str] = frozenset()
    origin: Operation | None = None
    exercise: Sizes = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    multiple_of: Mapping[str, int | str] = field(default_factory=dict)
    at_most: Mapping[str, int | str] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)
    special: bool = False
    operations: str | None = None
    tried: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    post_ops: bool = False
    factors: tuple[str, ...] = ()
    accumulator: str = "int32"
    multiplied_as: Mapping[str, str] = field(default_factory=dict)
    shifted_by: Mapping[str, str] = field(default_factory=dict)
    budget: Callable[..., Array] | None = None
    slack: Callable[..., Array] | None = None
    ideal: Callable[..., Array] | None = None
    draws: Mapping[str, Callable[[Draw], Array]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int | str, int | str]] = field(default_factory=dict)
    excludes: tuple[str, ...] = ()
    at_least: Mapping[str, int] = field(default_factory=dict)
    sized: tuple[str, ...] = ()
    tf32: bool = True
    others: tuple[Operation, ...] = ()
    part: int | None = None
    beside: tuple[TensorType, ...] = ()

    def __str__(self) -> str:
        return self.name

    def __call__(self, *arguments: Array | None, **named: Any) -> Array:
        """The reference itself, on arrays of any dtype, with its post-operations."""
        own, operands, post_ops = self.split(named)
        value = self.reference(*arguments, **own)
        return applied(value, np.zeros(()), post_ops, operands)[0] if self.post_ops else value

    def split(self, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """The arguments of the body, with static ones, those of what follows, and what follows."""
        given = {**self.static, **named}
        steps = given.pop("post_ops", None)
        operands = {n: given.pop(n) for n in OPERANDS if self.post_ops and n in given}
        return given, operands, steps

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        dtypes, static = (tuple(sorted(one.items())) for one in (self.dtypes, self.static))
        return self.name, self.reference, dtypes, static, self.without

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    # What the choice makes of the statement.

    @cached_property
    def inputs(self) -> tuple[TensorType, ...]:
        """The inputs that are present."""
        return tuple(self._chosen(tensor) for tensor in self.stated[:-1] if self._present(tensor))

    @cached_property
    def result(self) -> TensorType:
        """The result."""
        return self._chosen(self.stated[-1])

    def _chosen(self, tensor: TensorType) -> TensorType:
        numbers = {name: str(int(v)) for name, v in self.static.items() if isinstance(v, int)}

        def number(term: re.Match[str]) -> str:
            return numbers.get(term[0], term[0])

        dims = tuple(TERM.sub(number, dim) for dim in tensor.dims)
        return replace(tensor, dtype=self.dtypes.get(tensor.variable, tensor.dtype), dims=dims)

    def _present(self, tensor: TensorType) -> bool:
        if self.post_ops and tensor.name in OPERANDS[2:]:
            return not self.result.is_float
        return tensor.name not in self.without

    def tensor(self, name: str) -> TensorType:
        """The input or the result called `name`; KeyError lists the known names."""
        known = {tensor.name: tensor for tensor in (*self.inputs, self.result)}
        if name not in known:
            raise KeyError(f"{self.name} has no tensor {name!r}; it has {', '.join(known)}")
        return known[name]

    @property
    def optional(self) -> tuple[str, ...]:
        """The inputs that may be left out; scale and zero point of a result are no choice."""
        names = (tensor.name for tensor in self.stated[:-1] if tensor.optional)
        return tuple(name for name in names if not (self.post_ops and name in OPERANDS[2:]))

    # Choosing.

    @cached_property
    def _listed(self) -> tuple[TensorType, ...]:
        """The tensors whose dtypes make the signature: the factors, the result, and one of each
        variable that none of these has."""
        by_name = {tensor.name: tensor for tensor in self.stated}
        listed = [*(by_name[name] for name in self.factors), self.stated[-1]]
        for tensor in self.stated:
            if tensor.variable and tensor.variable not in {one.variable for one in listed}:
                listed.append(tensor)
        return tuple(listed)

    @property
    def signature(self) -> str:
        """The chosen dtypes, for example `u8:s8:s32`: of the factors, the result, and of what
        else is open."""
        return ":".join(self._chosen(tensor).format.code for tensor in self._listed)

    @property
    def signatures(self) -> tuple[str, ...]:
        """All that there are."""
        return tuple(self._by_signature)

    @cached_property
    def _by_signature(self) -> dict[str, Operation]:
        order = dict.fromkeys(tensor.variable for tensor in self._listed if tensor.variable)
        every = itertools.product(*(self.choices[variable] for variable in order))
        dtypes = (dict(zip(order, chosen, strict=True)) for chosen in every)
        made = (replace(self, dtypes=one, origin=self.origin or self) for one in dtypes)
        return {one.signature: one for one in made}

    def variant(
        self,
        *,
        dtypes: str | None = None,
        without: Iterable[str] = (),
        static: Mapping[str, Any] | None = None,
    ) -> Operation:
        """The operation with another choice: of dtypes (one of `signatures`), of inputs that are
        left out, of static parameters. ValueError for what there is not."""
        if dtypes is not None and dtypes not in self._by_signature:
            known = ", ".join(self.signatures)
            raise ValueError(f"{self.name}: no dtypes {dtypes!r}; known are {known}")
        chosen = self if dtypes is None else self._by_signature[dtypes]
        without, static = frozenset(without), dict(static or {})
        self._known("optional input", without, self.optional)
        self._known("static parameter", static, self.static)
        if not without and not static:
            return chosen
        origin = self.origin or self
        return replace(chosen, without=without, static={**self.static, **static}, origin=origin)

    def _known(self, what: str, given: Iterable[str], known: Iterable[str]) -> None:
        for name in given:
            if name not in known:
                names = ", ".join(known) or "none"
                raise ValueError(f"{self.name} has no {what} {name!r}; it has: {names}")

    @property
    def subsets(self) -> tuple[tuple[str, ...], ...]:
        """All sets of inputs that may be left out."""
        counts = range(len(self.optional) + 1)
        return tuple(s for n in counts for s in itertools.combinations(self.optional, n))

    @property
    def switches(self) -> tuple[dict[str, Any], ...]:
        """All combinations of what static parameters are tried with."""
        every = itertools.product(*self.tried.values())
        return tuple(dict(zip(self.tried, values, strict=True)) for values in every)

    def variants(self) -> Iterator[Operation]:
        """All choices of static parameters and dtypes, no input left out."""
        for static, dtypes in itertools.product(self.switches, self.signatures):
            yield self.variant(dtypes=dtypes, static=static)

    # Sizes.

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every size that is free, in order of appearance."""
        return tuple(dict.fromkeys(n for t in (*self.inputs, self.result) for n in t.names))

    def step(self, name: str) -> int:
        """What a size must be a multiple of."""
        return evaluate(self.multiple_of.get(name, 1), self.static)

    def least(self, name: str) -> int:
        """The smallest that a size may be."""
        return self.at_least.get(name, 1)

    def most(self, name: str) -> int | None:
        """The largest that a size may be."""
        most = self.at_most.get(name)
        return None if most is None else evaluate(most, self.static)

    def complete(self, sizes: Sizes) -> dict[str, int]:
        """These sizes, checked. ValueError if one is missing, unknown, too small or no multiple,
        or if the sums could overflow."""
        if set(sizes) != set(self.names):
            raise ValueError(
                f"{self.name} has the sizes {', '.join(self.names) or 'none'}; "
                f"got {', '.join(sizes) or 'none'}"
            )
        for name, size in sizes.items():
            step, most = self.step(name), self.most(name)
            if size < (least := self.least(name)):
                raise ValueError(f"{self.name}: {name} is {size}; it must be at least {least}")
            if size % step:
                raise ValueError(f"{self.name}: {name} is {size}; it must be a multiple of {step}")
            if most is not None and size > most:
                raise ValueError(f"{self.name}: {name} is {size}; it must be at most {most}")
        length, longest = self.reduction(sizes), self.longest_reduction()
        if longest is not None and length > longest:
            terms = "*".join(self.reduced)
            raise ValueError(
                f"{self.name} {self.signature}: a sum over {terms} = {length} can overflow "
                f"{self.accumulator}; at most {longest} terms fit, so split it"
            )
        return {name: int(sizes[name]) for name in self.names}

    def fitted(self, sizes: Sizes) -> dict[str, int]:
        """The sizes raised to what they must be at least, rounded up to their multiples, and cut
        to what they may be at most."""
        return {name: self._fitted(name, size) for name, size in sizes.items()}

    def _fitted(self, name: str, size: int) -> int:
        step, most = self.step(name), self.most(name)
        rounded = -(-max(size, self.least(name)) // step) * step
        return rounded if not most else min(rounded, most // step * step)

    def range_of(self, name: str, sizes: Sizes) -> tuple[int, int] | None:
        """The least and the largest value of an input, None if it may have any of its dtype.
        ValueError if there is none at these sizes."""
        if name not in self.ranges:
            return None
        low, end = (evaluate(one, {**self.static, **sizes}) for one in self.ranges[name])
        if end <= low:
            first, last = self.ranges[name]
            raise ValueError(
                f"{self.name}: ranges has ({first!r}, {last!r}) for {name}, which leaves no number "
                f"at {dict(sizes)}; the second must be above the first"
            )
        return low, end - 1

    # The product of the factors.

    @property
    def iterated(self) -> tuple[str, ...]:
        """The dimensions of the loop nest around one multiplication: those of the factors."""
        dims = (dim for name in self.factors for dim in self.tensor(name).dims)
        return tuple(dict.fromkeys(dims))

    @property
    def reduced(self) -> tuple[str, ...]:
        """The dimensions that are summed over: in a factor but not in the output."""
        return tuple(dim for dim in self.iterated if dim not in self.result.dims)

    def reduction(self, sizes: Sizes) -> int:
        """The number of products that are summed into one element of the output."""
        return math.prod(evaluate(dim, sizes) for dim in self.reduced)

    def factor_format(self, name: str) -> DType:
        """The format in which a factor is multiplied."""
        return DTYPES[self.multiplied_as.get(name, self.tensor(name).dtype)]

    def longest_reduction(self) -> int | None:
        """The longest sum that cannot overflow the accumulator; None if nothing can.

        It follows from the ranges of the factors: 65793 for u8 * s8 in s32, 131071 for s8 * s8.
        A zero point that is present widens a range.
        """
        formats = [self.factor_format(name) for name in self.factors]
        if not formats or any(one.is_float for one in (*formats, DTYPES[self.accumulator])):
            return None
        present = {tensor.name for tensor in self.inputs}
        left, right = (one.name for one in formats)
        first, second = (self.shifted_by.get(name) in present for name in self.factors)
        return longest_sum(left, right, self.accumulator, shifted=(first, second))

    def sum_length(self, sizes: Sizes) -> int:
        """How many terms the longest sum has: over `summed`, or what the result does not keep."""
        kept = self.result.names
        gone = [n for t in self.inputs for n in t.names if n not in kept]
        return math.prod(sizes[name] for name in dict.fromkeys((*self.summed, *gone)))

    def operation_count(self, sizes: Sizes) -> int:
        """Additions and multiplications; what is linear in the operands of a product (scales, a
        bias) is not counted."""
        if self.operations is not None:
            return evaluate(self.operations, {**self.static, **sizes})
        if self.factors:
            return 2 * math.prod(evaluate(dim, sizes) for dim in self.iterated)
        return math.prod(sizes.values())

    def case(
        self,
        sizes: Sizes,
        *,
        dtypes: str | None = None,
        without: Iterable[str] = (),
        static: Mapping[str, Any] | None = None,
        fill: str = "normal",
    ) -> Case:
        """This operation at given sizes, and with a choice as for `variant`."""
        from lowbit.spec.case import Case

        return Case(self.variant(dtypes=dtypes, without=without, static=static), sizes, fill)
