"""Languages of kernels, a file each."""
