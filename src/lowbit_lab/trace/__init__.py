"""What really runs when a library computes something: operators, calls, and the hot loop."""
