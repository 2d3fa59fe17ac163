"""Which kernels serve a node: one file a family of operators."""
