"""Timing the operators of `lowbit.torch.functional` against PyTorch's, on a GPU.

A file to each family of operators; whatever has the decorator `registry.operation` is found.
"""
