"""What can be traced by name, a file an engine."""
