"""AVX-512 with VNNI: thirty-two 512-bit registers and exact products of bytes and words."""

from __future__ import annotations

from lowbit.isa.avx2_vnni import byte_products, word_products
from lowbit.isa.avx512 import AVX512
from lowbit.isa.instruction_set import register

AVX512_VNNI = register(AVX512.plus("avx512_vnni", "avx512vnni"))

vpdpbusd = byte_products("vpdpbusd", 16, "avx512vnni")
vpdpbusd_half = byte_products("vpdpbusd_half", 8, "avx512vnni")
vpdpwssd = word_products("vpdpwssd", 16, "avx512vnni")
