"""Where the time of a network goes, and how far each layer is from the machine's limits."""
