"""Operators on a GPU: the cases of each, and everything that can run them.

A file to each family; whatever has the decorator `registry.operation` is found.
"""
