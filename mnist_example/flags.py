"""Define and check the flags of `run-sharded-mnist`, which `benchmark-dataset` takes too."""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_args

import numpy as np

from ipu_jax import SCHEDULES, Half, Precision, Reduction, canonical_name
from mnist_example.batches import Batches
from mnist_example.checks import check_choice
from mnist_example.model import MODES, Mode
from mnist_example.network import MLP_UPDATES, RESNET_UPDATES, network_of
from mnist_example.network import NAMES as MODELS
from mnist_example.optimizers import NAMES as OPTIMIZERS
from mnist_example.optimizers import default_learning_rate, keeps_state_in_float16

_Value = TypeVar("_Value")

PICTURE: Final = Path("mnist-losses.png")

_FLOAT32: Final = np.finfo(np.float32)
_REDUCTIONS: Final[tuple[Reduction, ...]] = get_args(Reduction)
_PRECISIONS: Final[tuple[Precision, ...]] = ("16.16", "16.32", "32.32")
_HALVES: Final[tuple[Half, ...]] = get_args(Half)
_MOST_EPOCHS: Final = 1_000_000
_MOST_WORKERS: Final = 1024


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags, with the network's defaults for those that were not given; bad flags exit."""
    args = parser.parse_args(argv)
    updates = network_of(args.model).updates
    own_rate = default_learning_rate(args.optimizer, of_sgd=updates.learning_rate)
    for name, value in (dataclasses.asdict(updates) | {"learning_rate": own_rate}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage that argparse prints before it."""
        self.exit(2, f"{self.prog}: {message}\n")


def _number(kind: Callable[[str], _Value], accept: Callable[[_Value], bool], rule: str) -> Callable[[str], _Value]:
    """Return an argparse type for numbers for which `accept` is true."""

    def of_text(text: str) -> _Value:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if accept(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")

    return of_text


_count = _number(int, lambda n: n >= 1, "a count: give a whole number of at least 1")
_positive = _number(float, lambda x: 0 < x < math.inf, "a positive number: give one such as 0.01")
# rates that float32 can represent: a rate that is rounded to 0 would silently train nothing
_rate = _number(
    float, lambda x: float(_FLOAT32.tiny) <= x <= float(_FLOAT32.max), "a positive number: give one such as 0.01"
)
_seed = _number(int, lambda n: 0 <= n < 2**32, "a seed: give a whole number from 0 to 4294967295")


def _path(text: str) -> Path:
    """Return `text` as a path; an argparse type. An empty path is refused: it would be the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path: give one that is not empty")
    return Path(text)


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return an argparse type for texts that `check` does not refuse by a ValueError, whose message is shown."""

    def of_text(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of_text


def _one_of(name: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return an argparse type for one of `choices`, in upper or lower case (TensorFlow for the IPU wrote "Grouped")."""
    return _checked(lambda text: check_choice(name, text.lower(), choices))


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the training flags."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog="Gradients are summed over the accumulation and the replicas unless you say --reduction mean: an update "
        "is learning-rate times gradient-accumulation-count times replicas times the mean gradient.",
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
    add("--plot", type=_path, metavar="FILE.png", help=f"where --compare draws (default: {PICTURE})")
    add(
        "--ipus",
        type=_count,
        default=2,
        metavar="N",
        help="IPUs of a replica; the mlp's basic mode takes 2 (default: %(default)s)",
    )
    add(
        "--replicas",
        type=_count,
        default=1,
        metavar="N",
        help="pipelines side by side, each with micro-batches of its own, on N times --ipus (default: %(default)s)",
    )

    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--epochs", type=_positive, default=3.0, metavar="X", help="epochs, also part of one (default: %(default)g)")
    of_mlp, of_resnet = MLP_UPDATES, RESNET_UPDATES
    add(
        "--optimizer",
        type=_one_of("optimizer", OPTIMIZERS),
        default="sgd",
        metavar=braces(OPTIMIZERS),
        help="optax's own; momentum is sgd with one of 0.9 (default: %(default)s)",
    )
    at = lambda name, of_sgd: f"{default_learning_rate(name, of_sgd):g}"  # noqa: E731
    add(
        "--learning-rate",
        type=_rate,
        metavar="X",
        help=f"of plain SGD; {of_resnet.learning_rate} for a resnet, with momentum a tenth; of adam and adamw "
        f"{at('adam', of_mlp.learning_rate)}, of lamb {at('lamb', of_mlp.learning_rate)} "
        f"(default: {of_mlp.learning_rate})",
    )
    add(
        "--shard-optimizer",
        action="store_true",
        help="each replica keeps and updates its part of the optimizer's state, with --replicas of 2 and more",
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
        "--gradient-accumulation",
        type=_count,
        metavar="N",
        help=f"micro-batches of a weight update on each replica; {of_resnet.gradient_accumulation_count} for a resnet "
        f"(default: {of_mlp.gradient_accumulation_count})",
    )
    add(
        "--reduction",
        type=_one_of("reduction", _REDUCTIONS),
        default="sum",
        metavar=braces(_REDUCTIONS),
        help="of the gradients over the accumulation and the replicas (default: %(default)s)",
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
        type=_one_of("precision", _PRECISIONS),
        default="32.32",
        metavar=braces(_PRECISIONS),
        help="bits of the operations, and of the stored weights (default: %(default)s)",
    )
    add(
        "--half",
        type=_one_of("half", _HALVES),
        metavar=braces(_HALVES),
        help="the 16 of --precision; under float16 the loss is scaled, and an update that overflows is skipped "
        "(default: bfloat16)",
    )

    running = parser.add_argument_group("running")
    add = running.add_argument
    add(
        "--pipeline-schedule",
        type=_checked(canonical_name),
        default="grouped",
        metavar=braces((*SCHEDULES, "auto")),
        help="grouped: IPUs work on different micro-batches at once. sequential: one IPU works at a time. auto: the "
        "one that takes the least time at the stages' FLOPs. Names of PyTorch and JaxPP are understood, too "
        "(default: %(default)s)",
    )
    add(
        "--repeat-count",
        "--device-iterations",
        type=_count,
        default=100,
        metavar="N",
        help="weight updates in one device call, after which a line is printed; a call ends with its epoch "
        "(default: %(default)s)",
    )
    add(
        "--executable-cache",
        type=_path,
        metavar="FOLDER",
        help="keep what is compiled there, and say how much of it was found: the second start compiles nothing",
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
        type=_path,
        metavar="FOLDER",
        help="with MNIST's four IDX files (default: $MNIST_DIR, else they are downloaded)",
    )
    source.add_argument("--synthetic-data", action="store_true", help="random images, to measure speed without data")

    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Check what a single flag does not show: how flags go together, and that the picture can be drawn.

    Raises:
        ValueError: flags that don't go together, or a picture that could not be drawn.
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
    if not args.compare:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--compare draws with matplotlib, which is not installed: pip install 'ipu-jax[plots]'")
    picture: Path = args.plot or PICTURE
    if picture.suffix.lower() != ".png":
        raise ValueError(f"--plot {picture} is no PNG file: give a name that ends in .png")
    if not picture.parent.is_dir():
        raise ValueError(f"--plot {picture}: there is no folder {picture.parent}")
    _check_writable(picture)


def _check_writable(picture: Path) -> None:
    try:
        is_new = not picture.exists()
        with picture.open("ab"):
            pass
        if is_new:
            picture.unlink()
    except OSError as error:
        raise ValueError(f"--plot {picture} cannot be written to ({error.strerror}): give another file") from error


def check_data_flags(args: argparse.Namespace) -> None:
    """Raise a ValueError for flags of the data that don't go together, or that ask for a run without end."""
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
