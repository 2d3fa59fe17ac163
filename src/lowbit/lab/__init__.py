"""The lab: looking at what kernels do, and why they are as fast or as slow as they are."""
