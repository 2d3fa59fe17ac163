"""One kernel text, two readings: compiled through LLVM, or interpreted on NumPy."""
