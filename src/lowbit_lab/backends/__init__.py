"""What runs kernels: one protocol, and a file of `kinds/` for each kind of kernel."""
