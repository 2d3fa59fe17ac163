"""Fast kernels in Triton, a file to each family.

Each file holds the kernels, the frozen record of what can be tuned about them with its
constraints, the shipped table of such records, the function that chooses among them and says why,
and the functions that allocate and launch. `lowbit.torch.functional` makes operators of these.
Triton's annotations do not say what its types become: so first lines switch pyright's rules off.
"""

LARGEST_HEAD = 256
"""Elements of a head that attention takes."""
MOST_QUERIES = 8
"""Of a sequence, that attention over a cache takes."""
