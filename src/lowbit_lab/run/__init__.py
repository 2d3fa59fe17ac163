"""Running a kernel once, every access seen: memory, traces, and what interpreters need."""
