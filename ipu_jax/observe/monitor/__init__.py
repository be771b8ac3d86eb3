"""Find the processes that use ipu_jax on this host, and show what each does: the command `ipu-monitor`."""
