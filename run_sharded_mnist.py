"""Run this checkout's `run-sharded-mnist` from where users of the original look for it."""

from mnist_example.run_sharded_mnist import command

if __name__ == "__main__":
    command()
