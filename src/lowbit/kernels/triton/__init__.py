"""Kernels in Triton. The teaching kernels solve the exercises of `lowbit.spec.exercises`, each as
plainly as it can be, for any shape."""

OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton that these kernels, and the checker, are made for, both included."""
