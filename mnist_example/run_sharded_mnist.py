"""Trains a network on handwritten digits as a pipeline over virtual IPUs: the `run-sharded-mnist` command.

    run-sharded-mnist --pipeline-mode basic
    run-sharded-mnist --pipeline-mode concurrent --ipus 4
    run-sharded-mnist --pipeline-mode basic --model resnet18 --epochs 1
    run-sharded-mnist --compare --plot losses.png

Exit status: 0 after training, 1 when it diverged, 2 for bad input (before anything is compiled), 130 after Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ipu_jax import configure
from ipu_jax.options import REDUCTIONS, check_choice
from ipu_jax.schedule import NAMES as SCHEDULES
from mnist_example.data import MNIST, load_mnist, synthetic_mnist
from mnist_example.model import MODES, PRECISIONS, Mode, weights_dtype
from mnist_example.network import MLP_UPDATES, RESNET_UPDATES, network_of
from mnist_example.network import NAMES as MODELS
from mnist_example.train import Batches, Call, DivergedError, Trainer

_Losses = npt.NDArray[np.floating]
_Value = TypeVar("_Value")

# So long the losses of the two modes agree closely; what rounding adds grows with every update.
_FIRST_UPDATES = 50

_PICTURE = Path("mnist-losses.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (default: the process's own), and returns its exit status; bad input exits."""
    parser = make_parser(
        "run-sharded-mnist", "Trains a network on handwritten digits, as a pipeline over virtual IPUs."
    )
    args = parse(parser, argv)
    try:
        try:
            _check(args)
            data = load(args)
            trainers = _make_trainers(args, data)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        losses: dict[Mode, _Losses] = {mode: _train(args, mode, trainer, data) for mode, trainer in trainers.items()}
        if args.compare:
            _compare(losses, args.plot or _PICTURE)
    except DivergedError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if argv is None:
            # An ordinary exit of the process waits for the device call in flight, which may take minutes.
            sys.stdout.flush()
            os._exit(130)
        return 130
    return 0


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, those that were not given as the network has them; bad ones exit."""
    args = parser.parse_args(argv)
    for name, value in dataclasses.asdict(network_of(args.model).updates).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage that argparse puts before it."""
        self.exit(2, f"{self.prog}: {message}\n")


def _number(kind: Callable[[str], _Value], accept: Callable[[_Value], bool], rule: str) -> Callable[[str], _Value]:
    """An argparse type: a number that `accept` takes."""

    def of_text(text: str) -> _Value:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if accept(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")

    return of_text


_count = _number(int, lambda n: n >= 1, "a count: give a whole number of at least 1")
_positive = _number(float, lambda x: 0 < x < math.inf, "a positive number: give one such as 0.01")
_seed = _number(int, lambda n: 0 <= n < 2**32, "a seed: give a whole number from 0 to 4294967295")


def _one_of(name: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    """An argparse type: one of `choices`, in any case of letters (TensorFlow for the IPU wrote "Grouped")."""

    def of_text(text: str) -> str:
        try:
            return check_choice(name, text.lower(), choices)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of_text


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The training flags, for whatever reads them."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog="Gradients are summed over the accumulation unless you say --reduction mean: an update is learning-rate "
        "times gradient-accumulation-count times the mean gradient.",
        allow_abbrev=False,
    )
    braces = lambda names: "{" + ",".join(names) + "}"  # noqa: E731
    add = parser.add_argument
    add(
        "--pipeline-mode",
        type=_one_of("mode", MODES),
        metavar=braces(MODES),
        help="basic: classifier and loss on the last IPU. concurrent: classifier and loss tensor-parallel on all IPUs. "
        "Required, unless --compare runs both",
    )
    add(
        "--model",
        type=_one_of("model", MODELS),
        default="mlp",
        metavar=braces(MODELS),
        help="mlp: 784-2560-1280-10, all but the classifier on IPU 0. resnet18, resnet50: their blocks spread over the "
        "IPUs (default: %(default)s)",
    )
    add(
        "--compare",
        action="store_true",
        help="train in both modes, from the same weights on the same batches, and draw their losses",
    )
    add("--plot", type=Path, metavar="FILE.png", help=f"where --compare draws (default: {_PICTURE})")
    add("--ipus", type=_count, default=2, metavar="N", help="IPUs; the mlp's basic mode takes 2 (default: %(default)s)")

    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--epochs", type=_positive, default=3.0, metavar="X", help="epochs, also part of one (default: %(default)g)")
    of_mlp, of_resnet = MLP_UPDATES, RESNET_UPDATES
    add(
        "--learning-rate",
        type=_positive,
        metavar="X",
        help=f"of plain SGD; {of_resnet.learning_rate} for a resnet (default: {of_mlp.learning_rate})",
    )
    add(
        "--batch-size",
        type=_count,
        metavar="N",
        help=f"images of a micro-batch; {of_resnet.batch_size} for a resnet, whose batch norm takes its statistics of "
        f"them (default: {of_mlp.batch_size})",
    )
    add(
        "--gradient-accumulation-count",
        type=_count,
        metavar="N",
        help=f"micro-batches of a weight update; {of_resnet.gradient_accumulation_count} for a resnet "
        f"(default: {of_mlp.gradient_accumulation_count})",
    )
    add(
        "--reduction",
        type=_one_of("reduction", REDUCTIONS),
        default="sum",
        metavar=braces(REDUCTIONS),
        help="of the gradients over the accumulation (default: %(default)s)",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of weights and batches (default: %(default)s)")
    add(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a new order of the images in each epoch (default: --shuffle)",
    )
    add(
        "--precision",
        type=_one_of("precision", PRECISIONS),
        default="32.32",
        metavar=braces(PRECISIONS),
        help="bits of the operations, and of the stored weights; 16 is bfloat16 (default: %(default)s)",
    )

    running = parser.add_argument_group("running")
    add = running.add_argument
    add(
        "--pipeline-schedule",
        type=_one_of("schedule", SCHEDULES),
        default="grouped",
        metavar=braces(SCHEDULES),
        help="grouped: IPUs work on different micro-batches at once. sequential: one IPU works at a time "
        "(default: %(default)s)",
    )
    add(
        "--repeat-count",
        type=_count,
        default=100,
        metavar="N",
        help="weight updates in one device call, after which a line is printed; a call ends with its epoch "
        "(default: %(default)s)",
    )
    add("--run-single-step", action="store_true", help="stop after one weight update, to see that all works")
    add("--no-progress", action="store_true", help="no progress bar; there is one on a terminal only, anyway")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--eight-bit-io",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="images cross to the IPUs as bytes, and are normalised there; --no-eight-bit-io: the host normalises "
        "them, and four times as many bytes cross, as float32 (default: --eight-bit-io)",
    )
    data.add_argument(
        "--async-dataloader",
        action="store_true",
        help="the batches of the next device calls are made and sent in the background",
    )
    data.add_argument(
        "--num-workers",
        type=_count,
        metavar="N",
        help="threads that make them, with --async-dataloader (default: 1)",
    )
    source = data.add_mutually_exclusive_group()
    source.add_argument(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="with MNIST's four IDX files (default: $MNIST_DIR, else they are downloaded)",
    )
    source.add_argument("--synthetic-data", action="store_true", help="random images, to measure speed without data")

    return parser


def _check(args: argparse.Namespace) -> None:
    """What no flag shows by itself.

    Raises:
        ValueError: flags that don't go together, or a picture that could not be drawn.
    """
    check_data_flags(args)
    if args.pipeline_mode is None and not args.compare:
        raise ValueError("--pipeline-mode is required: basic or concurrent; or --compare for both")
    if args.plot is not None and not args.compare:
        raise ValueError("--plot draws what --compare measures: give both, or neither")
    network = network_of(args.model)
    for mode, count in _ipus(args).items():
        network.check_ipus(mode, count)
    network.check_batch_size(args.batch_size)
    if not args.compare:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--compare draws with matplotlib, which is not installed: pip install 'ipu-jax[plots]'")
    picture: Path = args.plot or _PICTURE
    if picture.suffix.lower() != ".png":
        raise ValueError(f"--plot {picture} is no PNG file: give a name that ends in .png")
    if not picture.parent.is_dir():
        raise ValueError(f"--plot {picture}: there is no folder {picture.parent}")


def check_data_flags(args: argparse.Namespace) -> None:
    """Refuses, by a ValueError, flags of the data that don't go together."""
    if args.num_workers is not None and not args.async_dataloader:
        raise ValueError("--num-workers are threads of --async-dataloader: give both, or neither")


def feed_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of `mnist_example.train.make_feed`."""
    return {
        "repeat_count": 1 if args.run_single_step else args.repeat_count,
        "eight_bit_io": args.eight_bit_io,
        "num_workers": (args.num_workers or 1) if args.async_dataloader else 0,
    }


def _ipus(args: argparse.Namespace) -> dict[Mode, int]:
    """The modes to train in, in order, and the IPUs of each."""
    modes: list[Mode] = [args.pipeline_mode]
    if args.compare:
        # the mode that was asked for first, and the other one
        modes = sorted(MODES, key=lambda mode: mode != args.pipeline_mode)
    ipus: dict[Mode, int] = {mode: args.ipus for mode in modes}
    basic_ipus = network_of(args.model).basic_ipus
    if args.compare and basic_ipus is not None:
        ipus["basic"] = basic_ipus  # when both run, --ipus speaks of the concurrent one
    return ipus


def load(args: argparse.Namespace) -> MNIST:
    """The digits that the flags ask for."""
    return synthetic_mnist(args.seed) if args.synthetic_data else load_mnist(args.data_dir)


def make_batches(args: argparse.Namespace, data: MNIST) -> Batches:
    """The training batches that the flags ask for."""
    return Batches(
        data.train_images,
        data.train_labels,
        batch_size=args.batch_size,
        gradient_accumulation=args.gradient_accumulation_count,
        shuffle=args.shuffle,
        seed=args.seed,
    )


def _make_trainers(args: argparse.Namespace, data: MNIST) -> dict[Mode, Trainer]:
    """Builds everything, so that all that can be wrong with the data shows; compiles nothing."""
    ipus, network = _ipus(args), network_of(args.model)
    batches = make_batches(args, data)
    configure(max(ipus.values()))
    return {
        mode: Trainer(
            network.make_pipeline(
                mode,
                ipus=ipus[mode],
                gradient_accumulation=args.gradient_accumulation_count,
                schedule=args.pipeline_schedule,
                reduction=args.reduction,
                precision=args.precision,
            ),
            batches,
            learning_rate=args.learning_rate,
            **feed_options(args),
        )
        for mode in ipus
    }


def _train(args: argparse.Namespace, mode: Mode, trainer: Trainer, data: MNIST) -> _Losses:
    """One run, with its lines; returns the loss of every update."""
    pipeline, batches, network = trainer.pipeline, trainer.batches, network_of(args.model)
    per_epoch = batches.updates_per_epoch
    total = updates_of(args, batches)
    _say(
        f"{mode} {network.title} on {pipeline.ipus} IPUs, {pipeline.schedule.name}; {data.source}: {per_epoch} updates "
        f"an epoch, each of {args.gradient_accumulation_count} micro-batches of {args.batch_size}"
    )
    state = trainer.init(network.init_params(args.seed, weights_dtype(args.precision)), network.init_state())
    _say(f"Compiled in {trainer.compile(state):.1f} s")

    losses: list[_Losses] = []
    seconds = 0.0
    accuracy = 0.0
    with trainer.feed, progress_bar(shown=sys.stdout.isatty() and not args.no_progress) as progress:
        bar = progress.add_task(mode, total=total)

        def on_call(call: Call) -> None:
            losses.append(call.losses)
            _say(f"Epoch {call.epoch:.1f}, Mean loss: {call.losses.mean():.3f}")
            progress.update(bar, completed=call.updates)

        for epoch in range(-(-total // per_epoch)):
            updates = min(per_epoch, total - epoch * per_epoch)
            start = time.perf_counter()
            state = trainer.run_epoch(state, epoch, updates=updates, on_call=on_call)
            seconds += time.perf_counter() - start
            accuracy = trainer.accuracy(state, data.test_images, data.test_labels)
            _say(f"Epoch {epoch + updates / per_epoch:.1f}, Test accuracy: {accuracy:.2%}")
    images = total * batches.images_per_update
    _say(f"Test accuracy: {accuracy:.2%} after {images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    return np.concatenate(losses)


def updates_of(args: argparse.Namespace, batches: Batches) -> int:
    """How many weight updates the flags ask for."""
    return 1 if args.run_single_step else max(1, round(args.epochs * batches.updates_per_epoch))


def _say(line: str) -> None:
    print(line, flush=True)


def progress_bar(*, shown: bool) -> Progress:
    """A bar of updates below the lines that are printed while it stands; nothing at all unless `shown`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(), disable=not shown, transient=True)


def _compare(losses: dict[Mode, _Losses], path: Path) -> None:
    basic, concurrent = losses["basic"], losses["concurrent"]
    difference = np.abs(concurrent - basic) / basic
    first = difference[:_FIRST_UPDATES]
    _say(
        f"Largest relative difference of the losses: {first.max():.1e} over the first {len(first)} updates, "
        f"{difference.max():.1e} over all {len(difference)}"
    )
    _draw(basic, concurrent, difference, path)
    _say(f"Picture: {path}")


def _draw(basic: _Losses, concurrent: _Losses, difference: _Losses, path: Path) -> None:
    """Both curves above, one thick and one dashed, since they lie on one another; below, how far apart they are."""
    from matplotlib.figure import Figure  # an extra, and slow to import
    from matplotlib.ticker import MaxNLocator

    updates = np.arange(1, len(basic) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, differences = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    mark = "o" if len(basic) == 1 else ""  # one point makes no line
    curves.plot(updates, basic, color="#9ecae1", linewidth=5, marker=mark, markersize=12, label="basic")
    curves.plot(updates, concurrent, color="#d94801", linewidth=1.3, linestyle="--", marker=mark, label="concurrent")
    curves.set_ylabel("mean loss of an update")
    curves.set_title("Basic and concurrent pipeline: same weights, same batches")
    curves.legend()
    differences.semilogy(updates, np.maximum(difference, 1e-9), color="#636363", linewidth=1, marker=mark)
    differences.set_ylabel("relative difference")
    differences.set_xlabel("weight updates")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
