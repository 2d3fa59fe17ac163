"""Convolutions that are no products of matrices."""
