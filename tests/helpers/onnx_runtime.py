"""What ONNX Runtime does on this machine."""

from __future__ import annotations

import platform

from lowbit.isa import named

# On x86 without VNNI it adds pairs of products of bytes in 16 bits, and cuts off what does not fit.
SATURATES = platform.machine() == "x86_64" and all(
    named(name).missing() for name in ("avx512_vnni", "avx2_vnni")
)
