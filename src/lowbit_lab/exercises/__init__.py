"""The course: twelve kernels to write, each one idea further than the last."""
