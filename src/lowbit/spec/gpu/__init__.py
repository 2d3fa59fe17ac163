"""What the operators of `lowbit.torch.functional` compute: one file per family.

Each `Operation` has the dtypes that its operator takes. Those of gradients take what the operator
takes, and dz; they are named after what they return.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from lowbit.spec.typed import Operation


@cache
def operations() -> dict[str, Operation]:
    """All of them by name, in the order of the files' names and, within one, of its text."""
    found: dict[str, Operation] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        names = vars(importlib.import_module(f"{__name__}.{module.name}"))
        found |= {one.name: one for one in names.values() if isinstance(one, Operation)}
    return found
