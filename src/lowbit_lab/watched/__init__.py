"""Any program, every launch of Triton watched: no specification is needed."""
