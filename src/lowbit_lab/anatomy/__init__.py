"""The anatomy of a kernel: its text beside all that becomes of it. See docs/explain.md."""
