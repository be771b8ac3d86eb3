"""Provide what the commands share: reading a command line, messages, and ending a process. Nothing imports jax."""
