"""Kernels in Triton. The teaching kernels solve the exercises of `lowbit.spec.ladder`, each as
plainly as it can be, for any shape."""
