"""Fast kernels in Triton, a file to each family.

Each file holds the kernels, the frozen record of what can be tuned about them with its
constraints, the shipped table of such records, and the functions that allocate and launch.
`lowbit.gpu` makes operators of these.
"""
