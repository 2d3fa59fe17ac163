"""The operations that lowbit computes, one file per family.

Those of gradients take what the operator takes, and dz; they are named after what they return.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lowbit.registry import Registry
from lowbit.spec.language import one_of, operation
from lowbit.spec.operation import Operation

operations: Registry[Operation] = Registry("operation", __name__)
"""By name."""


specified = partial(operation, registry=operations)

# Annotations that leave the dtype open.
if TYPE_CHECKING:
    from typing import Annotated as Addend
    from typing import Annotated as AnyWeights
    from typing import Annotated as ByteWeights
    from typing import Annotated as Bytes
    from typing import Annotated as FloatOut
    from typing import Annotated as Floats
    from typing import Annotated as GroupWeights
    from typing import Annotated as Halves
    from typing import Annotated as Operands
    from typing import Annotated as ScaledOut
else:
    Bytes = one_of("Bytes", "uint8", "int8")
    ByteWeights = one_of("ByteWeights", "int8", "uint8")
    GroupWeights = one_of("GroupWeights", "int4", "uint4", "int8", "uint8")
    AnyWeights = one_of("AnyWeights", "int8", "uint8", "int4", "uint4")
    ScaledOut = one_of("ScaledOut", "float32", "bfloat16", "uint8", "int8")
    Operands = one_of("Operands", "float32", "bfloat16")
    Addend = one_of("Addend", "float32", "bfloat16")
    FloatOut = one_of("FloatOut", "float32", "bfloat16")
    Floats = one_of("Floats", "float32", "bfloat16", "float16")
    Halves = one_of("Halves", "bfloat16", "float16")
