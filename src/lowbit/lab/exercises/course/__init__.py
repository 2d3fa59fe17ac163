"""What the course says about each operation of `lowbit.spec.exercises`."""
