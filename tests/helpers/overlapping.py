"""What holds of a kernel whose launch overlaps with the one before it."""

from __future__ import annotations

import re

from lowbit.kernels.triton.ahead import Compiled

_TOUCHES = re.compile(r"\s(?:LDG|LDGSTS|STG|ATOM|ATOMG|RED|REDG|UTMALDG|UBLKCP)\b")


def assert_waits_first(made: Compiled, sm: int) -> None:
    """On Hopper no memory but parameters is read or written before earlier launches are done; on
    others there is nothing to wait for."""
    before, waits, _ = made.sass.partition("ACQBULK")  # what waits
    assert bool(waits) == (sm >= 90)
    assert not waits or not _TOUCHES.search(before)
