"""Check how flags go together, and count what they ask for. Nothing here imports jax."""

import argparse
import importlib.util
from typing import Any, Final

from ipu_jax.tools.command_line import MOST_IPUS
from mnist_example.batches import Batches
from mnist_example.flags import PICTURE
from mnist_example.layouts import MODES, Mode
from mnist_example.network import network_of
from mnist_example.optimizers import keeps_state_in_float16
from mnist_example.places import check_picture, writable_folder
from mnist_example.schedule_pictures import check_pictures

_MOST_EPOCHS: Final = 1_000_000
_MOST_WORKERS: Final = 1024


def check_flags(args: argparse.Namespace) -> None:
    """Check what a single flag does not show: how flags go together, and that files can be written.

    Raises:
        ValueError: flags that don't go together, or a picture or a folder that could not be written.
    """
    check_data_flags(args)
    if args.pipeline_mode is None and not args.compare:
        raise ValueError("--pipeline-mode is required: basic or concurrent; or --compare for both")
    if args.plot is not None and not args.compare:
        raise ValueError("--plot draws what --compare measures: give both, or neither")
    network = network_of(args.model)
    for mode, count in ipus_of(args).items():
        network.check_ipus(mode, count)
    network.check_batch_size(args.batch_size)
    if args.shard_optimizer and args.replicas == 1:
        raise ValueError("--shard-optimizer gives each replica its part, and there is one: give --replicas 2 or more")
    if args.half is not None and args.precision == "32.32":
        raise ValueError(f"--half {args.half} is the 16 of a precision: give --precision 16.16 or 16.32 too")
    if (args.half, args.precision) == ("float16", "16.16") and not keeps_state_in_float16(args.optimizer):
        raise ValueError(
            f"--optimizer {args.optimizer} divides by a root plus 1e-8, which is 0 in float16: "
            "give --precision 16.32, or --half bfloat16"
        )
    if args.compare:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--compare draws with matplotlib, which is not installed: pip install 'ipu-jax[plots]'")
        check_picture("--plot", args.plot or PICTURE)
    _check_saving(args)
    _check_watching(args)
    check_pictures(args)
    if args.trace_steps is not None and args.trace is None:
        raise ValueError("--trace-steps are those of --trace: give both, or neither")
    if args.trace is not None:
        if args.run_single_step:
            raise ValueError("--trace does not record the first update, and --run-single-step makes no other: give one")
        writable_folder("--trace", args.trace)
    if args.executable_cache is not None:
        writable_folder("--executable-cache", args.executable_cache)


def _check_watching(args: argparse.Namespace) -> None:
    for name in ("report", "log_file", "tensorboard"):
        if getattr(args, name) is not None and args.compare:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is about one training, and --compare makes two: give it with one --pipeline-mode")
    if args.report is not None:
        check_picture("--report", args.report, (".html",))
    if args.log_file is not None:
        check_picture("--log-file", args.log_file, (".jsonl",))
    if args.tensorboard is not None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise ValueError(
                "--tensorboard needs tensorboardX, which is not installed: pip install 'ipu-jax[tensorboard]'"
            )
        writable_folder("--tensorboard", args.tensorboard)


def _check_saving(args: argparse.Namespace) -> None:
    for name in ("checkpoint_every", "checkpoint_minutes", "resume", "keep", "on_save_error"):
        if getattr(args, name) is not None and args.checkpoint_dir is None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is about the checkpoints of --checkpoint-dir: give both, or neither")
    if args.checkpoint_dir is None:
        return
    if args.compare:
        raise ValueError("--compare trains two modes from the start: give --checkpoint-dir with one --pipeline-mode")
    if importlib.util.find_spec("orbax") is None:
        raise ValueError("--checkpoint-dir needs orbax, which is not installed: pip install 'ipu-jax[checkpoints]'")
    writable_folder("--checkpoint-dir", args.checkpoint_dir)


def check_data_flags(args: argparse.Namespace) -> None:
    """Raise a ValueError for flags of the data that don't go together, or that ask for more than a process can do."""
    if args.replicas * args.ipus > MOST_IPUS:
        replicas = f" x --replicas {args.replicas}" if args.replicas > 1 else ""
        raise ValueError(
            f"--ipus {args.ipus}{replicas} is more virtual IPUs than a process makes: give {MOST_IPUS} at most"
        )
    if args.epochs > _MOST_EPOCHS:
        raise ValueError(f"--epochs {args.epochs:g} would never end: give {_MOST_EPOCHS} at most")
    if args.num_workers is not None and args.num_workers > _MOST_WORKERS:
        raise ValueError(f"--num-workers {args.num_workers} are more threads than help: give {_MOST_WORKERS} at most")
    if args.num_workers is not None and not args.async_dataloader:
        raise ValueError("--num-workers are threads of --async-dataloader: give both, or neither")


def feed_options(args: argparse.Namespace, batches: Batches) -> dict[str, Any]:
    """Return the options of `make_feed` that the flags ask for. A call has no more updates than the flags ask for."""
    return {
        "repeat_count": min(args.repeat_count, updates_of(args, batches)),
        "eight_bit_io": args.eight_bit_io,
        "num_workers": (args.num_workers or 1) if args.async_dataloader else 0,
    }


def ipus_of(args: argparse.Namespace) -> dict[Mode, int]:
    """Return, for each mode to train in and in that order, the number of IPUs of a replica."""
    modes: list[Mode] = [args.pipeline_mode]
    if args.compare:
        # first the mode that was asked for, then the other one
        modes = sorted(MODES, key=lambda mode: mode != args.pipeline_mode)
    ipus: dict[Mode, int] = {mode: args.ipus for mode in modes}
    basic_ipus = network_of(args.model).basic_ipus
    if args.compare and basic_ipus is not None:
        ipus["basic"] = basic_ipus  # if both modes run, --ipus is for the concurrent one
    return ipus


def updates_of(args: argparse.Namespace, batches: Batches) -> int:
    """Return how many weight updates the flags ask for."""
    return 1 if args.run_single_step else max(1, round(args.epochs * batches.updates_per_epoch))
