"""Holding a kernel against the specification of its operation."""
