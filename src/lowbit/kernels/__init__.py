"""Kernels, one file each. Importing a folder of them registers what is in it."""
