"""Steps from a plain loop to a fast product, one idea each: of uint4, int8, float32, and on a GPU.

They are for reading, in Numba, in lowbit's own language of kernels, in Numba-CUDA and in Triton,
whichever shows the idea best; `lowbit.matmul` and `lowbit.gemm` are for use.
"""
