"""Run an optax update where the weights are: on packed and split leaves, or on each replica's part of them."""
