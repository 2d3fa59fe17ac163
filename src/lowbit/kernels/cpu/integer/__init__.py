"""Products of 8-bit and 4-bit integers: the frame, and its inner loops, one file each."""
