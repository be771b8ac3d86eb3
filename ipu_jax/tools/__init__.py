"""Command lines that prove the sharded ops against the unsharded program."""
