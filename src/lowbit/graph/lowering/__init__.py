"""What lowerings of operators have in common."""
