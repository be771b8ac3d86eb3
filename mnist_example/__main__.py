"""Run the command run-sharded-mnist: `python -m mnist_example`."""

from mnist_example.run_sharded_mnist import command

if __name__ == "__main__":
    command()
