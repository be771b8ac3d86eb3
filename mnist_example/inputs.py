"""Make what the flags ask for: the digits, the batches of a training, and the virtual IPUs."""

import argparse

from mnist_example.batches import Batches
from mnist_example.data import MNIST, load_mnist, synthetic_mnist


def load(args: argparse.Namespace) -> MNIST:
    """Return the digits that the flags ask for.

    Raises:
        ValueError, OSError: the folder that the user named does not hold them.
    """
    return synthetic_mnist(args.seed) if args.synthetic_data else load_mnist(args.data_dir)


def make_batches(args: argparse.Namespace, data: MNIST) -> Batches:
    """Return the training batches that the flags ask for.

    Raises:
        ValueError: there are too few images for one update.
    """
    return Batches(
        data.train_images,
        data.train_labels,
        batch_size=args.batch_size,
        gradient_accumulation=args.gradient_accumulation_count,
        shuffle=args.shuffle,
        seed=args.seed,
        replicas=args.replicas,
    )


def start_ipus(args: argparse.Namespace, ipus: int) -> None:
    """Import jax, and make `ipus` virtual IPUs for each replica.

    Raises:
        ValueError: they cannot be made, or the platform that the user named is not there.
    """
    from ipu_jax import configure

    count = args.replicas * ipus
    try:
        configure(count)
    except ValueError as error:
        flags = f"--ipus {ipus}" + (f" x --replicas {args.replicas}" if args.replicas > 1 else "")
        raise ValueError(str(error).replace(f"num_ipus={count}", flags)) from error
