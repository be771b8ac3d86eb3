"""The unsharded program, and the comparison with it."""
