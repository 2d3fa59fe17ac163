"""Products of float32 and bfloat16: the frame, its inner loops, and how it is cut."""
