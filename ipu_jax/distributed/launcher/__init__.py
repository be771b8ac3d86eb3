"""Start, watch, show and end the instances of a run: the parts of the command `poprun`. Nothing here imports jax."""
