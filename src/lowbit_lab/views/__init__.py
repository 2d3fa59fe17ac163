"""A run of a kernel as data, and as a page that shows it."""
