"""Quantizing a network, and the report on what became of it."""
