"""What products of integers and of floats share: layouts, packing, epilogues, functions."""
