"""Find the processes on this host that use ipu_jax, and show what each one does: the command `ipu-monitor`."""
