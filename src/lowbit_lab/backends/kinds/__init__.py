"""The kinds of kernels, a file each."""
