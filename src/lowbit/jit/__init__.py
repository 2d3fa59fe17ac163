"""One kernel text, two backends: compiled through LLVM, or interpreted on NumPy."""
