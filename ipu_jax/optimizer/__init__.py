"""An optax update, run where the weights lie: on packed and split leaves, or on each replica's part of them."""
