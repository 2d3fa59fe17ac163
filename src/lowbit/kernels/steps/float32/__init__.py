"""Products of float32 matrices, from three loops to packed operands."""
