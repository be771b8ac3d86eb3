"""Run the self-test: `python -m ipu_jax`."""

from ipu_jax.tools.self_test import command

if __name__ == "__main__":
    command()
