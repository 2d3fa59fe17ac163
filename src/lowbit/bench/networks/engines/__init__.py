"""The engines, one file a library."""
