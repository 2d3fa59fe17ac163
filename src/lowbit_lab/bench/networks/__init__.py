"""Whole networks in engines: prepared once, then timed in processes of their own, taking turns."""
