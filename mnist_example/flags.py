"""The flags of `run-sharded-mnist` and `benchmark-dataset`, their defaults, and which of them can be combined.

Nothing here imports jax, so that a wrong command line is refused at once.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from ipu_jax import SCHEDULES, Half, OnNonFinite, Precision, Reduction, canonical_name
from ipu_jax.base.cli.flags import add_flags, flag, flags_of
from ipu_jax.base.cli.parser import (
    MOST_IPUS,
    braces,
    checked,
    checkpoint,
    count,
    one_of,
    path,
    positive,
    rate,
    seed,
)
from ipu_jax.base.cli.places import check_file, writable_folder
from ipu_jax.distributed.commands import InstanceParser, counts_of

Mode = Literal["basic", "concurrent"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
OPTIMIZERS: Final = ("sgd", "momentum", "adam", "adamw", "lamb")
CLASSES: Final = 10
PACKAGES: Final = ("flax", "optax", "pooch", "requests", "rich", "sklearn")
"""The packages that the extra mnist installs."""
RESNET_BLOCKS: Final = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
"""The number of blocks with 64, 128, 256 and 512 channels."""

_MLP_LAYERS: Final = 3
_MOST_EPOCHS: Final = 1_000_000
_MOST_WORKERS: Final = 1024
# The defaults of an update. The original's 8, 84 and 0.01 make an mlp's loss jump from 2.4 to 9.8; with these it stays
# below 2.5 (docs/design/command-lines.md). With 84 micro-batches a resnet's loss would jump to 30, and batch statistics
# of 8 images are noisy.
_MLP: Final = {"batch_size": 16, "gradient_accumulation_count": 4, "learning_rate": 0.015, "repeat_count": 5}
_RESNET: Final = {"batch_size": 32, "gradient_accumulation_count": 2, "learning_rate": 0.02, "repeat_count": 1}
_RATES: Final = {"adam": 0.001, "adamw": 0.001, "lamb": 0.01}
# names in the library's errors, and the flags here that correspond to them
_CALLED: Final = {
    "mode": "--pipeline-mode",
    "schedule": "--pipeline-schedule",
    "micro_batch": "--batch-size",
    "micro_batches": "--gradient-accumulation-count",
    "gradient_accumulation": "--gradient-accumulation-count",
    "device_iterations": "--repeat-count",
    "ipus_per_replica": "--ipus",
    "replication_factor": "--replicas",
}


@dataclasses.dataclass(frozen=True)
class Flags:
    """The command line of a training."""

    pipeline_mode: Mode | None = flag(
        None, one_of("mode", MODES),
        "basic: classifier and loss on the last IPU. concurrent: classifier and loss tensor-parallel on all IPUs. "
        "Required, unless --compare runs both", metavar=braces(MODES),
    )  # fmt: skip
    model: str = flag(
        "mlp", one_of("model", ("mlp", *RESNET_BLOCKS)),
        "mlp: 784-2560-1280-10. resnet18, resnet50: their blocks spread over the IPUs",
        metavar=braces(("mlp", *RESNET_BLOCKS)),
    )  # fmt: skip
    compare: bool = flag(
        False, None, "train in both modes, from the same weights on the same batches, and draw their losses"
    )
    plot: Path | None = flag(None, path, "where --compare draws (default: mnist-losses.png)", metavar="FILE.png")
    ipus: int = flag(
        None, count,
        "IPUs of a replica; an mlp's basic mode takes 2 or 3; under poprun its --ipus-per-replica (default: 2)",
        metavar="N",
    )  # fmt: skip
    replicas: int = flag(
        None, count,
        "pipelines side by side, each with micro-batches of its own, on N times --ipus; under poprun its "
        "--num-replicas (default: 1)", metavar="N",
    )  # fmt: skip

    epochs: float = flag(3.0, positive, "epochs, also part of one", metavar="X", group="training")
    optimizer: str = flag(
        "sgd", one_of("optimizer", OPTIMIZERS), "optax's own; momentum is sgd with one of 0.9",
        metavar=braces(OPTIMIZERS), group="training",
    )  # fmt: skip
    learning_rate: float = flag(
        None, rate,
        "of plain SGD; 0.02 for a resnet, with momentum a tenth; of adam and adamw 0.001, of lamb 0.01 "
        "(default: 0.015)", metavar="X", group="training",
    )  # fmt: skip
    shard_optimizer: bool = flag(
        False, None, "each replica keeps and updates its part of the optimizer's state, with --replicas of 2 and more",
        group="training",
    )  # fmt: skip
    batch_size: int = flag(
        None, count,
        "images of a micro-batch; 32 for a resnet, whose batch norm takes its statistics of them (default: 16)",
        metavar="N", group="training",
    )  # fmt: skip
    gradient_accumulation_count: int = flag(
        None, count, "micro-batches of a weight update on each replica; 2 for a resnet (default: 4)",
        metavar="N", also="--gradient-accumulation", group="training",
    )  # fmt: skip
    reduction: Reduction = flag(
        "sum", one_of("reduction", get_args(Reduction)), "of the gradients over the accumulation and the replicas",
        metavar=braces(get_args(Reduction)), group="training",
    )  # fmt: skip
    seed: int = flag(0, seed, "of weights and batches", metavar="N", group="training")
    shuffle: bool = flag(True, None, "a new order of the images in each epoch", group="training")
    precision: Precision = flag(
        "32.32", one_of("precision", ("16.16", "16.32", "32.32")), "bits of the operations, and of the stored weights",
        metavar="{16.16,16.32,32.32}", group="training",
    )  # fmt: skip
    half: Half | None = flag(
        None, one_of("half", get_args(Half)),
        "the 16 of --precision; under float16 the loss is scaled, and an update that overflows is skipped "
        "(default: bfloat16)", metavar=braces(get_args(Half)), group="training",
    )  # fmt: skip
    on_nonfinite: OnNonFinite = flag(
        "stop", one_of("on_nonfinite", get_args(OnNonFinite)),
        "an update whose loss or gradients are not finite is not made, and is named with its replica, micro-batch and "
        "stage. stop: training ends. skip: it goes on, up to 10 of them in a row",
        metavar=braces(get_args(OnNonFinite)), group="training",
    )  # fmt: skip

    pipeline_schedule: str = flag(
        "grouped", checked(canonical_name),
        "grouped: IPUs work on different micro-batches at once. sequential: one IPU works at a time. auto: the one "
        "that takes the least time at the stages' FLOPs. Names of PyTorch and JaxPP are understood, too",
        metavar=braces((*SCHEDULES, "auto")), group="running",
    )  # fmt: skip
    plot_schedule: Path | None = flag(
        None, path,
        "before training, draw the schedule into this .svg, .png or .pdf file; with --compare a file per mode, as in "
        "FILE-basic.svg", metavar="FILE", group="running",
    )  # fmt: skip
    repeat_count: int = flag(
        None, count,
        "weight updates in one device call, after which the progress bar moves; a call ends with its epoch; 1 for a "
        "resnet (default: 5)", metavar="N", also="--device-iterations", group="running",
    )  # fmt: skip
    executable_cache: Path | None = flag(
        None, path,
        "keep what is compiled there, and say how much of it was found: the second start compiles nothing",
        metavar="FOLDER", group="running",
    )  # fmt: skip
    explain: bool = flag(
        False, None, "before training, print the schedule, and what each IPU stores, computes and sends in an update",
        group="running",
    )  # fmt: skip
    trace: Path | None = flag(
        None, path,
        "record what each IPU runs in a few updates early in the training, print where its time went, and write the "
        "timeline there, with the plan beside it, for https://ui.perfetto.dev", metavar="FOLDER", group="running",
    )  # fmt: skip
    trace_steps: int | None = flag(
        None, count, "updates that --trace records (default: 3)", metavar="N", group="running"
    )
    run_single_step: bool = flag(False, None, "stop after one weight update, to see that all works", group="running")
    no_progress: bool = flag(False, None, "no progress bar; there is one on a terminal only, anyway", group="running")

    report: Path | None = flag(
        None, path,
        "at the end, write a page with losses, accuracy, speed, the schedule, memory, flags, and with --trace the "
        "timeline: one file that opens anywhere", metavar="FILE.html", group="watching",
    )  # fmt: skip
    log_file: Path | None = flag(
        None, path,
        "write all figures there, a line of JSON for each device call; a file that is there is gone on with",
        metavar="FILE.jsonl", group="watching",
    )  # fmt: skip
    tensorboard: Path | None = flag(
        None, path, "write TensorBoard's files there; needs the extra tensorboard", metavar="FOLDER", group="watching"
    )

    checkpoint_dir: Path | None = flag(
        None, path,
        "save the training there while it goes on and at its end, and resume it from there. SIGTERM and Ctrl-C save, "
        "too: the same command goes on from there", metavar="FOLDER", group="saving",
    )  # fmt: skip
    checkpoint_every: int | None = flag(
        None, count, "save every N updates, at the end of the device call (default: at the end of each epoch)",
        metavar="N", group="saving",
    )  # fmt: skip
    checkpoint_minutes: float | None = flag(
        None, positive,
        "save when X minutes have passed since the last time (default: 10, unless --checkpoint-every is given)",
        metavar="X", group="saving",
    )  # fmt: skip
    resume: str | None = flag(
        None, checkpoint,
        "auto: from the last whole checkpoint there, if there is one. never: the folder must have none. PATH: from "
        "this checkpoint (default: auto)", metavar="{auto,never,PATH}", group="saving",
    )  # fmt: skip
    keep: int | None = flag(None, count, "how many checkpoints are kept (default: 3)", metavar="N", group="saving")
    on_save_error: str | None = flag(
        None, one_of("on_save_error", ("stop", "continue")),
        "stop: a save that fails ends the training. continue: it goes on, and tries again at the next (default: stop)",
        metavar="{stop,continue}", group="saving",
    )  # fmt: skip

    eight_bit_io: bool = flag(
        True, None,
        "images cross to the IPUs as bytes, and are normalised there; --no-eight-bit-io: the host normalises them, and "
        "four times as many bytes cross, as float32", group="data",
    )  # fmt: skip
    async_dataloader: bool = flag(
        False, None, "the batches of the next device calls are made and sent in the background", group="data"
    )
    num_workers: int | None = flag(
        None, count, "threads that make them, with --async-dataloader (default: 1)", metavar="N", group="data"
    )
    data_dir: Path | None = flag(
        None, path, "with MNIST's four IDX files (default: $MNIST_DIR, else they are downloaded)",
        metavar="FOLDER", group="data", excludes="sources",
    )  # fmt: skip
    synthetic_data: bool = flag(
        False, None, "random images, to measure speed without data", group="data", excludes="sources"
    )

    @property
    def modes(self) -> list[Mode]:
        """Return the modes to train in; with --compare both modes, the requested mode first."""
        asked = self.pipeline_mode or MODES[0]
        return sorted(MODES, key=lambda mode: mode != asked) if self.compare else [asked]

    @property
    def images_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation_count * self.replicas

    def ipus_of(self, mode: Mode) -> int:
        """Return the number of IPUs of a replica; with --compare, at most as many as the mode can use."""
        return min(self.ipus, most_ipus(self.model, mode)) if self.compare else self.ipus

    def updates_of(self, images: int) -> int:
        """Return how many weight updates the flags ask for, given the number of images."""
        return 1 if self.run_single_step else max(1, round(self.epochs * (images // self.images_per_update)))

    def repeats_of(self, images: int) -> int:
        """Return the number of updates per device call: at most an epoch's updates, and at most `updates_of`."""
        return min(self.repeat_count, max(1, images // self.images_per_update), self.updates_of(images))


def most_ipus(model: str, mode: Mode) -> int:
    """Return how many IPUs a network can use: one for each layer, and for each class of a concurrent classifier.

    >>> most_ipus("mlp", "basic"), most_ipus("mlp", "concurrent"), most_ipus("resnet18", "basic")
    (3, 10, 10)
    """
    if model == "mlp":
        return _MLP_LAYERS if mode == "basic" else CLASSES
    layers = 1 + sum(RESNET_BLOCKS[model])
    return layers + 1 if mode == "basic" else min(layers, CLASSES)


def parsed(prog: str, description: str, argv: Sequence[str] | None) -> tuple[InstanceParser, Flags]:
    """Return the parser and the flags, with poprun's counts and the model's defaults; a bad command line exits."""
    parser = InstanceParser(
        prog,
        description,
        epilog="Gradients are summed over the accumulation and the replicas unless you say --reduction mean: an update "
        "is learning-rate times gradient-accumulation-count times replicas times the mean gradient.",
        called=_CALLED,
    )
    add_flags(parser, Flags)
    flags = flags_of(Flags, parser.parse(argv))
    try:
        flags = dataclasses.replace(flags, **counts_of(flags.ipus, flags.replicas))
    except ValueError as error:
        parser.error(str(error))
    own = dict(_MLP if flags.model == "mlp" else _RESNET)
    if flags.optimizer == "momentum":
        own["learning_rate"] = round(own["learning_rate"] / 10, 12)  # the running sum is ten times a gradient
    own["learning_rate"] = _RATES.get(flags.optimizer, own["learning_rate"])
    own = {name: value for name, value in own.items() if getattr(flags, name) is None}
    return parser, dataclasses.replace(flags, **own)


def check_data_flags(flags: Flags) -> None:
    """Raise a ValueError for data flags that can't be combined, or that ask for more than a process can do."""
    if flags.replicas * flags.ipus > MOST_IPUS:
        replicas = f" x --replicas {flags.replicas}" if flags.replicas > 1 else ""
        raise ValueError(
            f"--ipus {flags.ipus}{replicas} is more virtual IPUs than a process makes: give {MOST_IPUS} at most"
        )
    if flags.epochs > _MOST_EPOCHS:
        raise ValueError(f"--epochs {flags.epochs:g} would never end: give {_MOST_EPOCHS} at most")
    if flags.num_workers is not None and flags.num_workers > _MOST_WORKERS:
        raise ValueError(f"--num-workers {flags.num_workers} are more threads than help: give {_MOST_WORKERS} at most")
    _need("--num-workers are threads of --async-dataloader", flags.num_workers is None or flags.async_dataloader)


def check_flags(flags: Flags) -> None:
    """Check what a single flag cannot show: that the flags can be combined, and that files can be written.

    Raises:
        ValueError: flags that can't be combined, or a file or folder that can't be written.
    """
    check_data_flags(flags)
    if flags.pipeline_mode is None and not flags.compare:
        raise ValueError("--pipeline-mode is required: basic or concurrent; or --compare for both")
    _need("--plot draws what --compare measures", flags.plot is None or flags.compare)
    for mode in flags.modes:
        most = most_ipus(flags.model, mode)
        if flags.ipus_of(mode) > most:
            raise ValueError(
                f"--ipus {flags.ipus}, but {flags.model} has {most} parts in {mode} mode: use {most} IPUs at most"
            )
    if flags.model != "mlp" and flags.batch_size < 2:
        raise ValueError("--batch-size 1, but batch norm subtracts a micro-batch's mean, which of one image leaves "
                         "nothing: use at least 2")  # fmt: skip
    if flags.shard_optimizer and flags.replicas == 1:
        raise ValueError("--shard-optimizer gives each replica its part, and there is one: give --replicas 2 or more")
    if flags.half is not None and flags.precision == "32.32":
        raise ValueError(f"--half {flags.half} is the 16 of a precision: give --precision 16.16 or 16.32 too")
    if (flags.half, flags.precision) == ("float16", "16.16") and flags.optimizer in ("adam", "adamw"):
        raise ValueError(
            f"--optimizer {flags.optimizer} divides by a root plus 1e-8, which is 0 in float16: give --precision "
            "16.32, or --half bfloat16"
        )
    _need("--trace-steps are those of --trace", flags.trace_steps is None or flags.trace is not None)
    if flags.trace is not None and flags.run_single_step:
        raise ValueError("--trace does not record the first update, and --run-single-step makes no other: give one")
    for name in ("checkpoint_every", "checkpoint_minutes", "resume", "keep", "on_save_error"):
        given = getattr(flags, name) is None or flags.checkpoint_dir is not None
        _need(f"--{name.replace('_', '-')} is about the checkpoints of --checkpoint-dir", given)
    for name in ("report", "log_file", "tensorboard", "checkpoint_dir"):
        if getattr(flags, name) is not None and flags.compare:
            flag_name = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag_name} is about one training, and --compare makes two: give --pipeline-mode instead"
            )
    _check_places(flags)


def _need(what: str, both: bool) -> None:
    if not both:
        raise ValueError(f"{what}: give both, or neither")


def _check_places(flags: Flags) -> None:
    for needed, package, extra, flag_name in (
        (flags.compare, "matplotlib", "plots", "--compare"),
        (flags.plot_schedule is not None, "matplotlib", "plots", "--plot-schedule"),
        (flags.report is not None, "matplotlib", "plots", "--report"),
        (flags.tensorboard is not None, "tensorboardX", "tensorboard", "--tensorboard"),
        (flags.checkpoint_dir is not None, "orbax", "checkpoints", "--checkpoint-dir"),
    ):
        if needed and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{flag_name} needs {package}, which is not installed: pip install 'ipu-jax[{extra}]', or leave it out"
            )
    if flags.compare:
        check_file("--plot", picture_of(flags), (".png",))
    for mode in flags.modes:
        if (file := schedule_picture_of(flags, mode)) is not None:
            if flags.compare and file.absolute() == picture_of(flags).absolute():
                raise ValueError(f"--plot-schedule would write {file}, and so would --plot: give them different names")
            check_file("--plot-schedule", file, (".svg", ".png", ".pdf"))
    for name, suffix in (("report", ".html"), ("log_file", ".jsonl")):
        if (file := getattr(flags, name)) is not None:
            check_file("--" + name.replace("_", "-"), file, (suffix,))
    for name in ("trace", "executable_cache", "tensorboard", "checkpoint_dir"):
        if getattr(flags, name) is not None:
            writable_folder("--" + name.replace("_", "-"), getattr(flags, name))


def picture_of(flags: Flags) -> Path:
    """Return where --compare draws."""
    return flags.plot or Path("mnist-losses.png")


def schedule_picture_of(flags: Flags, mode: Mode) -> Path | None:
    """Return where a mode's schedule is drawn. With --compare, each mode has a file, named after it."""
    file = flags.plot_schedule
    return file.parent / f"{file.stem}-{mode}{file.suffix}" if file is not None and flags.compare else file
