"""What all benchmarks share: cases, clocks, limits, records, tables, one runner."""
