"""The flags of `run-sharded-mnist` and `benchmark-dataset`, their defaults, and which of them can be combined.

Nothing here imports jax, so that a wrong command line is refused at once.
"""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from ipu_jax import cli
from ipu_jax.options import Half, OnNonFinite, Precision, Reduction
from ipu_jax.schedules import SCHEDULES, canonical_name

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
_MOST_IPUS: Final = 1024  # each has its own threads and compiled programs
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


def _checkpoint(text: str) -> str:
    if text not in ("auto", "never") and not cli.path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no checkpoint: give its folder, or auto, or never")
    return text


@dataclasses.dataclass(frozen=True)
class Flags:
    """The command line of a training."""

    # fmt: off
    pipeline_mode: Mode | None = cli.flag(
        None, cli.one_of("mode", MODES), "basic: classifier and loss on the last IPU. concurrent: classifier and loss "
        "tensor-parallel on all IPUs. Required, unless --compare runs both")
    model: str = cli.flag(
        "mlp", cli.one_of("model", ("mlp", *RESNET_BLOCKS)),
        "mlp: 784-2560-1280-10. resnet18, resnet50: their blocks spread over the IPUs")
    compare: bool = cli.flag(
        False, None, "train in both modes, from the same weights on the same batches, and draw their losses")
    plot: Path | None = cli.flag(None, cli.path, "where --compare draws (default: mnist-losses.png)", "FILE.png")
    ipus: int = cli.flag(
        None, cli.count, "IPUs of a replica; an mlp's basic mode takes 2 or 3; under poprun its --ipus-per-replica "
        "(default: 2)")
    replicas: int = cli.flag(
        None, cli.count, "pipelines side by side, each with micro-batches of its own, on N times --ipus; under poprun "
        "its --num-replicas (default: 1)")

    epochs: float = cli.flag(3.0, cli.positive, "epochs, also part of one", group="training")
    optimizer: str = cli.flag(
        "sgd", cli.one_of("optimizer", OPTIMIZERS), "optax's own; momentum is sgd with one of 0.9", group="training")
    learning_rate: float = cli.flag(
        None, cli.rate, "of plain SGD; 0.02 for a resnet, with momentum a tenth; of adam and adamw 0.001, of lamb 0.01 "
        "(default: 0.015)", group="training")
    shard_optimizer: bool = cli.flag(
        False, None, "each replica keeps and updates its part of the optimizer's state, with --replicas of 2 and more",
        group="training")
    batch_size: int = cli.flag(
        None, cli.count, "images of a micro-batch; 32 for a resnet, whose batch norm takes its statistics of them "
        "(default: 16)", group="training")
    gradient_accumulation_count: int = cli.flag(
        None, cli.count, "micro-batches of a weight update on each replica; 2 for a resnet (default: 4)",
        also="--gradient-accumulation", group="training")
    reduction: Reduction = cli.flag(
        "sum", cli.one_of("reduction", get_args(Reduction)),
        "of the gradients over the accumulation and the replicas", group="training")
    seed: int = cli.flag(0, cli.seed, "of weights and batches", group="training")
    shuffle: bool = cli.flag(True, None, "a new order of the images in each epoch", group="training")
    precision: Precision = cli.flag(
        "32.32", cli.one_of("precision", ("16.16", "16.32", "32.32")),
        "bits of the operations, and of the stored weights", group="training")
    half: Half | None = cli.flag(
        None, cli.one_of("half", get_args(Half)), "the 16 of --precision; under float16 the loss is scaled, and an "
        "update that overflows is skipped (default: bfloat16)", group="training")
    on_nonfinite: OnNonFinite = cli.flag(
        "stop", cli.one_of("on_nonfinite", get_args(OnNonFinite)), "an update whose loss or gradients are not finite "
        "is not made, and is named with its replica, micro-batch and stage. stop: training ends. skip: it goes on, up "
        "to 10 of them in a row", group="training")

    pipeline_schedule: str = cli.flag(
        "grouped", cli.checked(canonical_name), "grouped: IPUs work on different micro-batches at once. sequential: "
        "one IPU works at a time. auto: the one that takes the least time at the stages' FLOPs. Names of PyTorch and "
        "JaxPP are understood, too", "{" + ",".join((*SCHEDULES, "auto")) + "}", group="running")
    plot_schedule: Path | None = cli.flag(
        None, cli.path, "before training, draw the schedule into this .svg, .png or .pdf file; with --compare a file "
        "per mode, as in FILE-basic.svg", "FILE", group="running")
    repeat_count: int = cli.flag(
        None, cli.count, "weight updates in one device call, after which the progress bar moves; a call ends with its "
        "epoch; 1 for a resnet (default: 5)", also="--device-iterations", group="running")
    executable_cache: Path | None = cli.flag(
        None, cli.path, "keep what is compiled there, and say how much of it was found: the second start compiles "
        "nothing", "FOLDER", group="running")
    explain: bool = cli.flag(
        False, None, "before training, print the schedule, and what each IPU stores, computes and sends in an update",
        group="running")
    trace: Path | None = cli.flag(
        None, cli.path, "record what each IPU runs in a few updates early in the training, print where its time went, "
        "and write the timeline there, with the plan beside it, for https://ui.perfetto.dev", "FOLDER", group="running")
    trace_steps: int | None = cli.flag(None, cli.count, "updates that --trace records (default: 3)", group="running")
    compile_for: str | None = cli.flag(
        None, str, "train nothing: compile a device call for chips that are not there, such as v5e:2x2 or h100x4, and "
        "print the memory, traffic and time that it takes; status 1 if it does not fit", "TOPOLOGY", group="running")
    run_single_step: bool = cli.flag(
        False, None, "stop after one weight update, to see that all works", group="running")
    no_progress: bool = cli.flag(
        False, None, "no progress bar; there is one on a terminal only, anyway", group="running")

    report: Path | None = cli.flag(
        None, cli.path, "at the end, write a page with losses, accuracy, speed, the schedule, memory, flags, and with "
        "--trace the timeline: one file that opens anywhere", "FILE.html", group="watching")
    log_file: Path | None = cli.flag(
        None, cli.path, "write all figures there, a line of JSON for each device call; a file that is there is gone on "
        "with", "FILE.jsonl", group="watching")
    tensorboard: Path | None = cli.flag(
        None, cli.path, "write TensorBoard's files there; needs the extra tensorboard", "FOLDER", group="watching")

    checkpoint_dir: Path | None = cli.flag(
        None, cli.path, "save the training there while it goes on and at its end, and resume it from there. SIGTERM "
        "and Ctrl-C save, too: the same command goes on from there", "FOLDER", group="saving")
    checkpoint_every: int | None = cli.flag(
        None, cli.count, "save every N updates, at the end of the device call (default: at the end of each epoch)",
        group="saving")
    checkpoint_minutes: float | None = cli.flag(
        None, cli.positive, "save when X minutes have passed since the last time (default: 10, unless "
        "--checkpoint-every is given)", group="saving")
    resume: str | None = cli.flag(
        None, _checkpoint, "auto: from the last whole checkpoint there, if there is one. never: the folder must have "
        "none. PATH: from this checkpoint (default: auto)", "{auto,never,PATH}", group="saving")
    keep: int | None = cli.flag(None, cli.count, "how many checkpoints are kept (default: 3)", group="saving")
    on_save_error: str | None = cli.flag(
        None, cli.one_of("on_save_error", ("stop", "continue")), "stop: a save that fails ends the training. continue: "
        "it goes on, and tries again at the next (default: stop)", group="saving")

    eight_bit_io: bool = cli.flag(
        True, None, "images cross to the IPUs as bytes, and are normalised there; --no-eight-bit-io: the host "
        "normalises them, and four times as many bytes cross, as float32", group="data")
    async_dataloader: bool = cli.flag(
        False, None, "the batches of the next device calls are made and sent in the background", group="data")
    num_workers: int | None = cli.flag(
        None, cli.count, "threads that make them, with --async-dataloader (default: 1)", group="data")
    data_dir: Path | None = cli.flag(
        None, cli.path, "with MNIST's four IDX files (default: $MNIST_DIR, else they are downloaded)", "FOLDER",
        group="data", excludes="sources")
    synthetic_data: bool = cli.flag(
        False, None, "random images, to measure speed without data", group="data", excludes="sources")
    # fmt: on

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

    @property
    def picture(self) -> Path:
        """Return where --compare draws."""
        return self.plot or Path("mnist-losses.png")

    def picture_of(self, mode: Mode) -> Path | None:
        """Return where a mode's schedule is drawn. With --compare, each mode has a file, named after it."""
        file = self.plot_schedule
        return file.parent / f"{file.stem}-{mode}{file.suffix}" if file is not None and self.compare else file


def most_ipus(model: str, mode: Mode) -> int:
    """Return how many IPUs a network can use: one for each layer, and for each class of a concurrent classifier.

    >>> most_ipus("mlp", "basic"), most_ipus("mlp", "concurrent"), most_ipus("resnet18", "basic")
    (3, 10, 10)
    """
    if model == "mlp":
        return _MLP_LAYERS if mode == "basic" else CLASSES
    layers = 1 + sum(RESNET_BLOCKS[model])
    return layers + 1 if mode == "basic" else min(layers, CLASSES)


def parsed(prog: str, description: str, argv: Sequence[str] | None) -> tuple[cli.Parser, Flags]:
    """Return the parser and the flags, with poprun's counts and the model's defaults; a bad command line exits."""
    parser = cli.Parser(
        prog,
        description,
        epilog="Gradients are summed over the accumulation and the replicas unless you say --reduction mean: an update "
        "is learning-rate times gradient-accumulation-count times replicas times the mean gradient.",
        called=_CALLED,
    )
    cli.add_flags(parser, Flags)
    flags = cli.flags_of(Flags, parser.parse(argv))
    try:
        flags = dataclasses.replace(flags, **cli.counts_of(flags.ipus, flags.replicas))
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
    replicas = f" x --replicas {flags.replicas}" if flags.replicas > 1 else ""
    _refuse(
        (flags.replicas * flags.ipus > _MOST_IPUS,
         f"--ipus {flags.ipus}{replicas} is more virtual IPUs than a process makes: give {_MOST_IPUS} at most"),
        (flags.epochs > _MOST_EPOCHS, f"--epochs {flags.epochs:g} would never end: give {_MOST_EPOCHS} at most"),
        ((flags.num_workers or 0) > _MOST_WORKERS,
         f"--num-workers {flags.num_workers} are more threads than help: give {_MOST_WORKERS} at most"),
        (flags.num_workers is not None and not flags.async_dataloader,
         "--num-workers are threads of --async-dataloader: give both, or neither"),
    )  # fmt: skip


def check_flags(flags: Flags) -> None:
    """Check what a single flag cannot show: that the flags can be combined, and that files can be written.

    Raises:
        ValueError: flags that can't be combined, or a file or folder that can't be written.
    """
    check_data_flags(flags)
    no_mode = flags.pipeline_mode is None and not flags.compare
    both = "give both, or neither"
    _refuse(
        (no_mode, "--pipeline-mode is required: basic or concurrent; or --compare for both"),
        (flags.plot is not None and not flags.compare, f"--plot draws what --compare measures: {both}"),
        *((flags.ipus_of(mode) > (most := most_ipus(flags.model, mode)),
           f"--ipus {flags.ipus}, but {flags.model} has {most} parts in {mode} mode: use {most} IPUs at most")
          for mode in flags.modes),
        (flags.model != "mlp" and flags.batch_size < 2,
         "--batch-size 1, but batch norm subtracts a micro-batch's mean, which of one image leaves nothing: use at "
         "least 2"),
        (flags.shard_optimizer and flags.replicas == 1,
         "--shard-optimizer gives each replica its part, and there is one: give --replicas 2 or more"),
        (flags.half is not None and flags.precision == "32.32",
         f"--half {flags.half} is the 16 of a precision: give --precision 16.16 or 16.32 too"),
        ((flags.half, flags.precision) == ("float16", "16.16") and flags.optimizer in ("adam", "adamw"),
         f"--optimizer {flags.optimizer} divides by a root plus 1e-8, which is 0 in float16: give --precision 16.32, "
         "or --half bfloat16"),
        (flags.trace_steps is not None and flags.trace is None, f"--trace-steps are those of --trace: {both}"),
        (flags.trace is not None and flags.run_single_step,
         "--trace does not record the first update, and --run-single-step makes no other: give one"),
        *((getattr(flags, name) is not None and flags.checkpoint_dir is None,
           f"{_typed(name)} is about the checkpoints of --checkpoint-dir: {both}")
          for name in ("checkpoint_every", "checkpoint_minutes", "resume", "keep", "on_save_error")),
        *((getattr(flags, name) is not None and flags.compare,
           f"{_typed(name)} is about one training, and --compare makes two: give --pipeline-mode instead")
          for name in ("report", "log_file", "tensorboard", "checkpoint_dir")),
        *((getattr(flags, name) is not None and flags.compile_for is not None,
           f"{_typed(name)} is about a training, and --compile-for makes none: give one of the two")
          for name in ("plot", "plot_schedule", "trace", "report", "log_file", "tensorboard", "checkpoint_dir")),
        *((getattr(flags, name) not in (None, False) and importlib.util.find_spec(package) is None,
           f"{_typed(name)} needs {package}, which is not installed: pip install 'ipu-jax[{extra}]', or leave it out")
          for name, package, extra in (
              ("compare", "matplotlib", "plots"), ("plot_schedule", "matplotlib", "plots"),
              ("report", "matplotlib", "plots"), ("tensorboard", "tensorboardX", "tensorboard"),
              ("checkpoint_dir", "orbax", "checkpoints"))),
    )  # fmt: skip
    if flags.compare:
        cli.check_file("--plot", flags.picture, (".png",))
    for mode in flags.modes:
        if (file := flags.picture_of(mode)) is not None:
            if flags.compare and file.absolute() == flags.picture.absolute():
                raise ValueError(f"--plot-schedule would write {file}, and so would --plot: give them different names")
            cli.check_file("--plot-schedule", file, (".svg", ".png", ".pdf"))
    for name, suffix in (("report", ".html"), ("log_file", ".jsonl")):
        if (file := getattr(flags, name)) is not None:
            cli.check_file(_typed(name), file, (suffix,))
    for name in ("trace", "executable_cache", "tensorboard", "checkpoint_dir"):
        if getattr(flags, name) is not None:
            cli.writable_folder(_typed(name), getattr(flags, name))


def _refuse(*rules: tuple[bool, str]) -> None:
    """Raise a ValueError with the text of the first rule that is broken."""
    for is_broken, text in rules:
        if is_broken:
            raise ValueError(text)


def _typed(name: str) -> str:
    return "--" + name.replace("_", "-")
