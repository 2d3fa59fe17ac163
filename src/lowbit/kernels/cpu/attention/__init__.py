"""Attention as one operation: scores, softmax and weighted values, a few queries at a time."""
