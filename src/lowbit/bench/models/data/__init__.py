"""Data with labels, as arrays: NumPy, and PIL for photographs."""
