"""Exhaustive search over compressed vectors."""
