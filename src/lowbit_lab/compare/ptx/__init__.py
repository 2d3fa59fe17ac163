"""PTX, NVIDIA's assembly for GPUs that need not be there: read, run, and its accesses judged."""
