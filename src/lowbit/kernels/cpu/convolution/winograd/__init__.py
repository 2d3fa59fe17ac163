"""Convolution with windows of 3 x 3 by Winograd's algorithm, in whole numbers."""
