"""Exact products of 8-bit integers, unsigned by signed, from three loops to tiles."""
