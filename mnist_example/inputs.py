"""Make what the flags ask for: the digits, the batches of a training, and the virtual IPUs."""

import argparse
import os

from mnist_example import instances
from mnist_example.batches import Batches
from mnist_example.data import MNIST, load_mnist, synthetic_mnist


def prepare(args: argparse.Namespace, ipus: int) -> tuple[MNIST, Batches]:
    """Return the digits and the training batches that the flags ask for, and make `ipus` IPUs for each replica.

    Data that may have to be downloaded are read last, so that a platform that is missing is named at once; then an
    instance connects with the others, of which the first on each host downloads them. Any other data are read first,
    before jax is imported.

    Raises:
        ValueError, OSError: a folder that the user named does not hold the digits, there are too few images for one
            update, or the IPUs cannot be made.
    """
    may_download = not (args.synthetic_data or args.data_dir or os.environ.get("MNIST_DIR"))
    if may_download:
        _start_ipus(args, ipus)
    load = (lambda: synthetic_mnist(args.seed)) if args.synthetic_data else (lambda: load_mnist(args.data_dir))
    data = instances.first_of_host_first(load) if may_download else load()
    batches = _make_batches(args, data)
    if not may_download:
        _start_ipus(args, ipus)
    return data, batches


def _make_batches(args: argparse.Namespace, data: MNIST) -> Batches:
    return Batches(
        data.train_images,
        data.train_labels,
        batch_size=args.batch_size,
        gradient_accumulation=args.gradient_accumulation_count,
        shuffle=args.shuffle,
        seed=args.seed,
        replicas=args.replicas,
    )


def _start_ipus(args: argparse.Namespace, ipus: int) -> None:
    from ipu_jax import configure

    instances.connect()
    count = instances.local_ipus(args.replicas, ipus)
    try:
        configure(count)
    except ValueError as error:
        flags = f"--ipus {ipus}" + (f" x --replicas {args.replicas}" if args.replicas > 1 else "")
        raise ValueError(str(error).replace(f"num_ipus={count}", flags)) from error
