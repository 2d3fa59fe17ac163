"""Kernels for CPUs, over the code generator in lowbit.jit.

product.py is the frame of every matrix product; micro_*.py are its inner loops, one for each kind
of instruction set; pack.py and activation.py bring operands into the layout of layout.py.
"""
