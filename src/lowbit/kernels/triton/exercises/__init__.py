"""Kernels to learn from: they solve the exercises of `lowbit.spec.exercises`, each as plainly as it
can be, for any shape."""
