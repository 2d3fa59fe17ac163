"""What ATen's operators are in a graph: one function each, one file a family."""
