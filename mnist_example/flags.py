"""The flags of `run-sharded-mnist` and `benchmark-dataset`, their defaults, and which of them can be combined.

Nothing here imports jax, so that a wrong command line is refused at once.
"""

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args

from ipu_jax import cli
from ipu_jax.options import Half, OnNonFinite, Precision, Reduction
from ipu_jax.schedules import SCHEDULES, canonical_name

_Flags = TypeVar("_Flags", bound="DataFlags")
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
_OF_TRAINING: Final = "run-sharded-mnist has it, and it changes nothing in what is read: leave it out"
_EPOCHS: Final = 3.0
_EPOCHS_OF_FEW: Final = 20.0
_FEW: Final = 10_000
_NAMES: Final = {
    "--pipeline-mode": "mode",
    "--pipeline-schedule": "schedule",
    "--batch-size": "micro_batch micro_batch_size mbs bs",
    "--gradient-accumulation-count": "gradient_accumulation gradient_accumulation_steps micro_batches accumulate "
    "accumulate_grad_batches accumulation_steps grad_accum",
    "--repeat-count": "device_iterations",
    "--ipus": "ipus_per_replica num_ipus",
    "--replicas": "replication_factor num_replicas",
    "--epochs": "num_epochs max_epochs n_epochs",
    "--seed": "seed_everything random_seed",
    "--learning-rate": "lr",
    "--num-workers": "workers",
}
_CALLED: Final = {word: flag for flag, words in _NAMES.items() for word in words.split()}
"""Other names of flags: those in the library's errors, and those that people type."""

_HINTS: Final = {
    "momentum nesterov": "--optimizer momentum is sgd with one of 0.9",
    "weight-decay wd decay": "--optimizer adamw decays the weights by 0.0001",
    "scheduler lr-scheduler lr-schedule warmup": "--learning-rate is constant",
    "steps max-steps num-steps iterations updates": "--epochs 0.1 is part of one, --run-single-step one update",
    "verbose v debug": "--explain prints the schedule, and what each IPU does",
    "quiet q silent": "--no-progress leaves the bar out",
    "dataset": "it trains on MNIST (--data-dir, or a download) or random images (--synthetic-data)",
    "gpu gpus num-gpus device devices cuda cpu tpu": "--ipus gives their number, $JAX_PLATFORMS their kind",
    "layers num-layers hidden width depth stages pp tp": "--model names the network, and --ipus divides it",
    "dp data-parallel": "--replicas trains copies side by side",
    "fp16 bf16 amp dtype mixed-precision": "--precision 16.32 computes in bfloat16, with --half float16 in float16",
    "use-ipu-model ipu-model": "the IPUs are virtual without a flag: leave it out",
    "config config-file": "every setting is a flag: write the command line into a script",
    "output out o output-dir save save-dir save-model": "--checkpoint-dir saves the training, --report a page about it",
    "load restore checkpoint ckpt resume-from": "--checkpoint-dir saves a training run, and goes on from there",
    "profile profiler": "--trace records what each IPU runs",
    "log logs log-dir logdir wandb": "--log-file or --tensorboard writes the figures",
    "n np num-instances nnodes nodes nproc-per-node": "poprun starts several processes: poprun --help says how",
    "test eval evaluate val": "the test images are classified after each epoch, without a flag",
}


def _checkpoint(text: str) -> str:
    if text not in ("auto", "never") and not cli.path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a checkpoint: give its folder, or auto, or never")
    return text


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """The flags that say which batches are read: the command line of `benchmark-dataset`."""

    # fmt: off
    model: str = cli.flag(
        "mlp", cli.one_of("model", ("mlp", *RESNET_BLOCKS)),
        "the network; the sizes of its batches are the defaults. mlp: 784-2560-1280-10. resnet18, resnet50: blocks "
        "spread over the IPUs")
    ipus: int = cli.flag(
        None, cli.count, "virtual IPUs of a replica; an mlp's basic mode takes 2 or 3; under poprun its "
        "--ipus-per-replica (default: 2)")
    replicas: int = cli.flag(
        None, cli.count, "pipelines side by side; each has micro-batches of its own, on N times --ipus; under "
        "poprun its --num-replicas (default: 1)")
    epochs: float | None = cli.flag(
        None, cli.positive, "epochs, or part of one; 20 on fewer than 10,000 images (default: 3)", group="training")
    batch_size: int = cli.flag(
        None, cli.count, "images of a micro-batch; 32 for a resnet, whose batch norm takes its statistics from them "
        "(default: 16)", group="training")
    gradient_accumulation_count: int = cli.flag(
        None, cli.count, "micro-batches of an update; on each replica; 2 for a resnet (default: 4)",
        group="training")
    seed: int = cli.flag(0, cli.seed, "seed of weights and batches", group="training")
    shuffle: bool = cli.flag(True, None, "new order in each epoch", group="training")
    repeat_count: int = cli.flag(
        None, cli.count, "updates in one device call; then the progress bar moves; a call ends with its epoch; "
        "1 for a resnet (default: 5)", group="running")
    run_single_step: bool = cli.flag(
        False, None, "stop after one update; to see that all works", group="running")
    no_progress: bool = cli.flag(
        False, None, "show no bar; there is one on a terminal only, anyway", group="running")
    eight_bit_io: bool = cli.flag(
        True, None, "images cross to the IPUs as bytes; they are normalised there; --no-eight-bit-io: the host "
        "normalises them, and four times as many bytes cross, as float32", group="data")
    async_dataloader: bool = cli.flag(
        False, None, "make the next batches in the background; send them, too", group="data")
    num_workers: int | None = cli.flag(
        None, cli.count, "threads of --async-dataloader (default: 1)", group="data")
    data_dir: Path | None = cli.flag(
        None, cli.path, "folder of MNIST's four IDX files (default: $MNIST_DIR, else a download)", "FOLDER",
        group="data", excludes="sources")
    synthetic_data: bool = cli.flag(
        False, None, "random images; to measure speed without data", group="data", excludes="sources")
    # fmt: on

    @property
    def images_per_update(self) -> int:
        return self.batch_size * self.gradient_accumulation_count * self.replicas

    def epochs_of(self, images: int) -> float:
        """Return how many epochs the flags ask for, given the number of images.

        >>> DataFlags().epochs_of(60_000), DataFlags().epochs_of(1_437), DataFlags(epochs=0.5).epochs_of(1_437)
        (3.0, 20.0, 0.5)
        """
        return self.epochs or (_EPOCHS if images >= _FEW else _EPOCHS_OF_FEW)

    def updates_of(self, images: int) -> int:
        """Return how many weight updates the flags ask for, given the number of images."""
        per_epoch = images // self.images_per_update
        return 1 if self.run_single_step else max(1, round(self.epochs_of(images) * per_epoch))

    def repeats_of(self, images: int) -> int:
        """Return the number of updates per device call: at most an epoch's updates, and at most `updates_of`."""
        return min(self.repeat_count, max(1, images // self.images_per_update), self.updates_of(images))


@dataclasses.dataclass(frozen=True)
class Flags(DataFlags):
    """The command line of a training run."""

    # fmt: off
    pipeline_mode: Mode = cli.flag(
        "concurrent", cli.one_of("mode", MODES), "classifier and loss on the last IPU, or split over all. basic: the "
        "last IPU computes them alone. concurrent: all IPUs compute them at once, tensor-parallel")
    compare: bool = cli.flag(
        False, None, "train in both modes, and draw their losses; from the same weights on the same batches")
    plot: Path | None = cli.flag(None, cli.path, "--compare's plot (default: mnist-losses.png)", "FILE.png")
    optimizer: str = cli.flag(
        "sgd", cli.one_of("optimizer", OPTIMIZERS), "one of optax; momentum is sgd with one of 0.9", group="training")
    learning_rate: float = cli.flag(
        None, cli.rate, "learning rate; 0.02 for a resnet, with momentum a tenth; 0.001 for adam and adamw, 0.01 "
        "for lamb (default: 0.015)", group="training")
    shard_optimizer: bool = cli.flag(
        False, None, "split the optimizer's state over --replicas; each keeps and updates its part",
        group="training")
    reduction: Reduction = cli.flag(
        "sum", cli.one_of("reduction", get_args(Reduction)),
        "of gradients over an update; over the accumulation and the replicas; sum: an update is learning-rate times "
        "gradient-accumulation-count times replicas times the mean gradient", group="training")
    precision: Precision = cli.flag(
        "32.32", cli.one_of("precision", ("16.16", "16.32", "32.32")),
        "bits of operations and weights; as they are stored", group="training")
    half: Half | None = cli.flag(
        None, cli.one_of("half", get_args(Half)), "the 16 of --precision; under float16 the loss is scaled, and an "
        "update that overflows is skipped (default: bfloat16)", group="training")
    on_nonfinite: OnNonFinite = cli.flag(
        "stop", cli.one_of("on_nonfinite", get_args(OnNonFinite)), "at a non-finite update; in its loss or "
        "gradients; it is not made, and is named with its replica, micro-batch and stage. stop: training ends. skip: "
        "it goes on, up to 10 of them in a row", group="training")
    pipeline_schedule: str = cli.flag(
        "grouped", cli.checked(canonical_name), "a name, or auto. grouped: IPUs work on different micro-batches at "
        "once. sequential: one IPU works at a time. auto: the one that takes the least time at the stages' FLOPs. "
        f"Others: {', '.join(name for name in SCHEDULES if name not in ('grouped', 'sequential'))}. Names of PyTorch "
        "and JaxPP are understood, too", "NAME", group="running")
    plot_schedule: Path | None = cli.flag(
        None, cli.path, "draw the schedule before training; into this .svg, .png or .pdf file; with --compare a file "
        "per mode, as in FILE-basic.svg", "FILE", group="running")
    executable_cache: Path | None = cli.flag(
        None, cli.path, "keep what is compiled there; say how much of it was found; the second start compiles "
        "nothing", "FOLDER", group="running")
    explain: bool = cli.flag(
        False, None, "print the schedule and its costs; before training: what each IPU stores, computes and sends",
        group="running")
    trace: Path | None = cli.flag(
        None, cli.path, "record what each IPU runs; in a few updates early in the training; print where its time went, "
        "and write the timeline there, with the plan beside it, for https://ui.perfetto.dev", "FOLDER", group="running")
    trace_steps: int | None = cli.flag(None, cli.count, "updates that --trace records (default: 3)", group="running")
    compile_for: str | None = cli.flag(
        None, str, "compile for chips such as v5e:2x2; or h100x4, which need not be there; train nothing, and print "
        "memory, traffic and time of a device call; status 1 if it does not fit", "TOPOLOGY", group="running")
    report: Path | None = cli.flag(
        None, cli.path, "write a page about the training; at its end: losses, accuracy, speed, the schedule, memory, "
        "flags, and with --trace the timeline, in one file that opens anywhere", "FILE.html", group="watching")
    log_file: Path | None = cli.flag(
        None, cli.path, "write all figures as JSON; a line for each device call; an existing file is continued",
        "FILE.jsonl", group="watching")
    tensorboard: Path | None = cli.flag(
        None, cli.path, "write TensorBoard's files there; needs the extra tensorboard", "FOLDER", group="watching")
    checkpoint_dir: Path | None = cli.flag(
        None, cli.path, "save the training, and resume it; while it goes on, and at its end. SIGTERM and "
        " Ctrl-C save, too: the same command goes on from there", "FOLDER", group="saving")
    checkpoint_every: int | None = cli.flag(
        None, cli.count, "save every N updates; at the end of the device call (default: each epoch)",
        group="saving")
    checkpoint_minutes: float | None = cli.flag(
        None, cli.positive, "save X minutes after the last; never, if only --checkpoint-every is given "
        "(default: 10)", group="saving")
    resume: str | None = cli.flag(
        None, _checkpoint, "checkpoint to go on from. auto: the last whole one there, if any. never: the folder "
        "must have none. PATH: this one (default: auto)", "{auto,never,PATH}", group="saving")
    keep: int | None = cli.flag(None, cli.count, "how many checkpoints are kept (default: 3)", group="saving")
    on_save_error: str | None = cli.flag(
        None, cli.one_of("on_save_error", ("stop", "continue")), "when a save fails. stop: end the "
        "training. continue: go on, and try again at the next (default: stop)", group="saving")
    # fmt: on

    @property
    def modes(self) -> list[Mode]:
        """Return the modes to train in; with --compare both modes, the requested mode first."""
        asked = self.pipeline_mode
        return sorted(MODES, key=lambda mode: mode != asked) if self.compare else [asked]

    def ipus_of(self, mode: Mode) -> int:
        """Return the number of IPUs of a replica; with --compare, at most as many as the mode can use."""
        return min(self.ipus, most_ipus(self.model, mode)) if self.compare else self.ipus

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


def parsed(prog: str, about: str, argv: Sequence[str] | None, of: type[_Flags]) -> tuple[cli.Parser, _Flags]:
    """Return the parser and the flags, with poprun's counts and the model's defaults; a bad command line exits."""
    hints = _HINTS | dict.fromkeys(_names_of(Flags) - _names_of(of), _OF_TRAINING)
    parser = cli.Parser(prog, about, called=_CALLED, hints=hints, brief=True)
    cli.add_flags(parser, of)
    flags = cli.flags_of(of, parser.parse(argv))
    try:
        flags = dataclasses.replace(flags, **cli.counts_of(flags.ipus, flags.replicas))
    except ValueError as error:
        parser.error(str(error))
    own = dict(_MLP if flags.model == "mlp" else _RESNET)
    optimizer = getattr(flags, "optimizer", "sgd")
    if optimizer == "momentum":
        own["learning_rate"] = round(own["learning_rate"] / 10, 12)  # the running sum is ten times a gradient
    own["learning_rate"] = _RATES.get(optimizer, own["learning_rate"])
    own = {name: value for name, value in own.items() if getattr(flags, name, ...) is None}
    return parser, dataclasses.replace(flags, **own)


def _names_of(of: type[DataFlags]) -> set[str]:
    """Return the flags of a command, and their other names, without the dashes before them."""
    names = {field.name for field in dataclasses.fields(of)}
    names |= {name for name, flag in _CALLED.items() if flag[2:].replace("-", "_") in names}
    return {name.replace("_", "-") for name in names}


def check_data_flags(flags: DataFlags) -> None:
    """Raise a ValueError for data flags that can't be combined, or that ask for more than a process can do."""
    replicas = f" x --replicas {flags.replicas}" if flags.replicas > 1 else ""
    _refuse(
        (flags.replicas * flags.ipus > _MOST_IPUS,
         f"--ipus {flags.ipus}{replicas} is more virtual IPUs than a process makes: give {_MOST_IPUS} at most"),
        ((epochs := flags.epochs or 0) > _MOST_EPOCHS,
         f"--epochs {epochs:g} would never end: give {_MOST_EPOCHS} at most"),
        ((flags.num_workers or 0) > _MOST_WORKERS,
         f"--num-workers {flags.num_workers} is more threads than can help: give {_MOST_WORKERS} at most"),
        (flags.num_workers is not None and not flags.async_dataloader,
         "--num-workers are threads of --async-dataloader: give both, or neither"),
    )  # fmt: skip


def check_flags(flags: Flags) -> None:
    """Check what a single flag cannot show: that the flags can be combined, and that files can be written.

    Raises:
        ValueError: flags that can't be combined, or a file or folder that can't be written.
    """
    check_data_flags(flags)
    both = "give both, or neither"
    _refuse(
        (flags.plot is not None and not flags.compare, f"--plot draws what --compare measures: {both}"),
        *((flags.ipus_of(mode) > (most := most_ipus(flags.model, mode)),
           f"--ipus {flags.ipus}, but {flags.model} has {most} parts in {mode} mode: use {most} IPUs at most")
          for mode in flags.modes),
        (flags.model != "mlp" and flags.batch_size < 2,
         "--batch-size 1, but batch norm subtracts a micro-batch's mean, which leaves nothing of one image: use at "
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
           f"{_typed(name)} is about one run, and --compare makes two: give --pipeline-mode instead")
          for name in ("report", "log_file", "tensorboard", "checkpoint_dir")),
        *((getattr(flags, name) is not None and flags.compile_for is not None,
           f"{_typed(name)} is about a training run, and --compile-for starts none: give one of the two")
          for name in ("plot", "plot_schedule", "trace", "report", "log_file", "tensorboard", "checkpoint_dir")),
        *((getattr(flags, name) not in (None, False) and importlib.util.find_spec(package) is None,
           f"{_typed(name)} needs {package}, which is not installed: pip install 'ipu-jax[{extra}]', or leave it out")
          for name, package, extra in (
              ("compare", "matplotlib", "plots"), ("plot_schedule", "matplotlib", "plots"),
              ("report", "matplotlib", "plots"), ("tensorboard", "tensorboardX", "tensorboard"),
              ("checkpoint_dir", "orbax", "checkpoints"))),
    )  # fmt: skip
    _check_files(flags)


def _check_files(flags: Flags) -> None:
    """Raise a ValueError for a file or folder that can't be written."""
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
