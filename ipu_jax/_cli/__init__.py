"""What the commands share: how a command line is read, what is said, and how a process ends. Nothing imports jax."""
