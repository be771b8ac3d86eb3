"""Command lines that compare the sharded ops with the unsharded program."""
