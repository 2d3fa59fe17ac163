"""Exact products of 4-bit integers: how few bits change what is worth doing."""
