"""Floats to integers with scales, where a weight or a vector is prepared once."""
