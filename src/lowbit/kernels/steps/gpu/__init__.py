"""Products of float32 matrices on a GPU, from a thread for each output to tensor cores."""
