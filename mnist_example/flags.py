"""Define the flags of `run-sharded-mnist`, which `benchmark-dataset` takes too. `flag_checks.py` checks them together.

Nothing here imports jax, so that a wrong command line is refused at once.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from ipu_jax import SCHEDULES, Half, OnNonFinite, Precision, Reduction, canonical_name
from ipu_jax.tools.command_line import Parser
from mnist_example import flag_types
from mnist_example.instances import InstanceParser, fill_in_counts
from mnist_example.layouts import MODES
from mnist_example.network import MLP_UPDATES, RESNET_UPDATES, network_of
from mnist_example.network import NAMES as MODELS
from mnist_example.optimizers import NAMES as OPTIMIZERS
from mnist_example.optimizers import default_learning_rate

ON_SAVE_ERROR: Final = ("stop", "continue")
PICTURE: Final = Path("mnist-losses.png")

_REDUCTIONS: Final[tuple[Reduction, ...]] = get_args(Reduction)
_PRECISIONS: Final[tuple[Precision, ...]] = ("16.16", "16.32", "32.32")
_HALVES: Final[tuple[Half, ...]] = get_args(Half)
_ON_NONFINITE: Final[tuple[OnNonFinite, ...]] = get_args(OnNonFinite)
# names that the library's errors give to what has a flag of another name here
_CALLED: Final = {
    "mode": "--pipeline-mode",
    "schedule": "--pipeline-schedule",
    "micro_batches": "--gradient-accumulation-count",
    "ipus_per_replica": "--ipus",
    "replication_factor": "--replicas",
}


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags, with poprun's counts and the network's defaults where not given; bad flags exit."""
    args = parser.parse(argv)
    try:
        fill_in_counts(args)
    except ValueError as error:
        parser.error(str(error))
    updates = network_of(args.model).updates
    own_rate = default_learning_rate(args.optimizer, of_sgd=updates.learning_rate)
    for name, value in (dataclasses.asdict(updates) | {"learning_rate": own_rate}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def make_parser(prog: str, description: str) -> Parser:
    """Return a parser of the training flags."""
    parser = InstanceParser(
        prog,
        description,
        epilog="Gradients are summed over the accumulation and the replicas unless you say --reduction mean: an update "
        "is learning-rate times gradient-accumulation-count times replicas times the mean gradient.",
        called=_CALLED,
    )
    braces = lambda names: "{" + ",".join(names) + "}"  # noqa: E731
    add = parser.add_argument
    add(
        "--pipeline-mode",
        type=flag_types.one_of("mode", MODES),
        metavar=braces(MODES),
        help="basic: classifier and loss on the last IPU. concurrent: classifier and loss tensor-parallel on all IPUs. "
        "Required, unless --compare runs both",
    )
    add(
        "--model",
        type=flag_types.one_of("model", MODELS),
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
    add("--plot", type=flag_types.path, metavar="FILE.png", help=f"where --compare draws (default: {PICTURE})")
    add(
        "--ipus",
        type=flag_types.count,
        metavar="N",
        help="IPUs of a replica; the mlp's basic mode takes 2; under poprun its --ipus-per-replica (default: 2)",
    )
    add(
        "--replicas",
        type=flag_types.count,
        metavar="N",
        help="pipelines side by side, each with micro-batches of its own, on N times --ipus; under poprun its "
        "--num-replicas (default: 1)",
    )

    training = parser.add_argument_group("training")
    add = training.add_argument
    add(
        "--epochs",
        type=flag_types.positive,
        default=3.0,
        metavar="X",
        help="epochs, also part of one (default: %(default)g)",
    )
    of_mlp, of_resnet = MLP_UPDATES, RESNET_UPDATES
    add(
        "--optimizer",
        type=flag_types.one_of("optimizer", OPTIMIZERS),
        default="sgd",
        metavar=braces(OPTIMIZERS),
        help="optax's own; momentum is sgd with one of 0.9 (default: %(default)s)",
    )
    at = lambda name, of_sgd: f"{default_learning_rate(name, of_sgd):g}"  # noqa: E731
    add(
        "--learning-rate",
        type=flag_types.rate,
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
        type=flag_types.count,
        metavar="N",
        help=f"images of a micro-batch; {of_resnet.batch_size} for a resnet, whose batch norm takes its statistics of "
        f"them (default: {of_mlp.batch_size})",
    )
    add(
        "--gradient-accumulation-count",
        "--gradient-accumulation",
        type=flag_types.count,
        metavar="N",
        help=f"micro-batches of a weight update on each replica; {of_resnet.gradient_accumulation_count} for a resnet "
        f"(default: {of_mlp.gradient_accumulation_count})",
    )
    add(
        "--reduction",
        type=flag_types.one_of("reduction", _REDUCTIONS),
        default="sum",
        metavar=braces(_REDUCTIONS),
        help="of the gradients over the accumulation and the replicas (default: %(default)s)",
    )
    add("--seed", type=flag_types.seed, default=0, metavar="N", help="of weights and batches (default: %(default)s)")
    add(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a new order of the images in each epoch (default: --shuffle)",
    )
    add(
        "--precision",
        type=flag_types.one_of("precision", _PRECISIONS),
        default="32.32",
        metavar=braces(_PRECISIONS),
        help="bits of the operations, and of the stored weights (default: %(default)s)",
    )
    add(
        "--half",
        type=flag_types.one_of("half", _HALVES),
        metavar=braces(_HALVES),
        help="the 16 of --precision; under float16 the loss is scaled, and an update that overflows is skipped "
        "(default: bfloat16)",
    )
    add(
        "--on-nonfinite",
        type=flag_types.one_of("on_nonfinite", _ON_NONFINITE),
        default="stop",
        metavar=braces(_ON_NONFINITE),
        help="an update whose loss or gradients are not finite is not made, and is named with its replica, micro-batch "
        "and stage. stop: training ends. skip: it goes on, up to 10 of them in a row (default: %(default)s)",
    )

    running = parser.add_argument_group("running")
    add = running.add_argument
    add(
        "--pipeline-schedule",
        type=flag_types.checked(canonical_name),
        default="grouped",
        metavar=braces((*SCHEDULES, "auto")),
        help="grouped: IPUs work on different micro-batches at once. sequential: one IPU works at a time. auto: the "
        "one that takes the least time at the stages' FLOPs. Names of PyTorch and JaxPP are understood, too "
        "(default: %(default)s)",
    )
    add(
        "--plot-schedule",
        type=flag_types.path,
        metavar="FILE",
        help="before training, draw the schedule into this .svg or .png file; with --compare a file per mode, as in "
        "FILE-basic.svg",
    )
    add(
        "--repeat-count",
        "--device-iterations",
        type=flag_types.count,
        metavar="N",
        help="weight updates in one device call, after which the progress bar moves; a call ends with its epoch; "
        f"{of_resnet.repeat_count} for a resnet (default: {of_mlp.repeat_count})",
    )
    add(
        "--executable-cache",
        type=flag_types.path,
        metavar="FOLDER",
        help="keep what is compiled there, and say how much of it was found: the second start compiles nothing",
    )
    add(
        "--explain",
        action="store_true",
        help="before training, print the schedule, and what each IPU stores, computes and sends in an update",
    )
    add(
        "--trace",
        type=flag_types.path,
        metavar="FOLDER",
        help="record what each IPU runs in a few updates early in the training, print where its time went, and write "
        "the timeline there, with the plan beside it, for https://ui.perfetto.dev",
    )
    add("--trace-steps", type=flag_types.count, metavar="N", help="updates that --trace records (default: 3)")
    add("--run-single-step", action="store_true", help="stop after one weight update, to see that all works")
    add("--no-progress", action="store_true", help="no progress bar; there is one on a terminal only, anyway")

    watching = parser.add_argument_group("watching")
    add = watching.add_argument
    add(
        "--report",
        type=flag_types.path,
        metavar="FILE.html",
        help="at the end, write a page with losses, accuracy, speed, the schedule, memory, flags, and with --trace the "
        "timeline: one file that opens anywhere",
    )
    add(
        "--log-file",
        type=flag_types.path,
        metavar="FILE.jsonl",
        help="write all figures there, a line of JSON for each device call; a file that is there is gone on with",
    )
    add(
        "--tensorboard",
        type=flag_types.path,
        metavar="FOLDER",
        help="write TensorBoard's files there; needs the extra tensorboard",
    )

    saving = parser.add_argument_group(
        "saving", "With --checkpoint-dir, SIGTERM saves and ends the training; the same command goes on from there."
    )
    add = saving.add_argument
    add(
        "--checkpoint-dir",
        type=flag_types.path,
        metavar="FOLDER",
        help="save the training there while it goes on and at its end, and resume it from there",
    )
    add(
        "--checkpoint-every",
        type=flag_types.count,
        metavar="N",
        help="save every N updates, at the end of the device call (default: at the end of each epoch)",
    )
    add(
        "--checkpoint-minutes",
        type=flag_types.positive,
        metavar="X",
        help="save when X minutes have passed since the last time (default: 10, unless --checkpoint-every is given)",
    )
    add(
        "--resume",
        type=flag_types.resume,
        metavar="{auto,never,PATH}",
        help="auto: from the last whole checkpoint there, if there is one. never: the folder must have none. PATH: "
        "from this checkpoint (default: auto)",
    )
    add("--keep", type=flag_types.count, metavar="N", help="how many checkpoints are kept (default: 3)")
    add(
        "--on-save-error",
        type=flag_types.one_of("on_save_error", ON_SAVE_ERROR),
        metavar=braces(ON_SAVE_ERROR),
        help="stop: a save that fails ends the training. continue: it goes on, and tries again at the next "
        "(default: stop)",
    )

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
        type=flag_types.count,
        metavar="N",
        help="threads that make them, with --async-dataloader (default: 1)",
    )
    source = data.add_mutually_exclusive_group()
    source.add_argument(
        "--data-dir",
        type=flag_types.path,
        metavar="FOLDER",
        help="with MNIST's four IDX files (default: $MNIST_DIR, else they are downloaded)",
    )
    source.add_argument("--synthetic-data", action="store_true", help="random images, to measure speed without data")

    return parser
