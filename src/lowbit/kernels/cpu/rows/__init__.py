"""Work on rows: what makes those of the left operand, and what keeps the best of a row."""
