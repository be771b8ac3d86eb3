"""Train as the flags of `run-sharded-mnist` say, in one mode or both, and print the results."""

import contextlib
import dataclasses
import functools
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
import optax

import ipu_jax
from ipu_jax import cli, popdist
from mnist_example import model, resnet
from mnist_example.data import MNIST, described
from mnist_example.flags import DataFlags, Flags, Mode, parsed

PROG: Final = "run-sharded-mnist"
_WARNINGS: Final = (ipu_jax.io.CheckpointWarning, ipu_jax.steps.NonFiniteLossWarning, ipu_jax.observe.RunLogWarning)
_LEARNING: Final = (
    *("batch_size", "epochs", "gradient_accumulation_count", "half", "learning_rate", "optimizer", "precision"),
    *("reduction", "run_single_step", "shuffle"),
)
"""The flags that change what is learnt, besides `--replicas`."""
_FIRST_UPDATES: Final = 50
"""The number of updates for which the modes' losses agree closely; rounding differences grow with every update."""

_Losses = npt.NDArray[np.floating]


def say(line: str, *, is_error: bool = False) -> None:
    """Print a line at once, on the first instance only."""
    if popdist.is_first():
        print(f"{PROG}: {line}" if is_error else line, file=sys.stderr if is_error else sys.stdout, flush=True)


def feed_of(flags: DataFlags, data: MNIST, **whom: Any) -> ipu_jax.Feed:
    """Return a feed of training images, one batch for each device call; `whom` names a `step=` or a `mesh=`."""
    arrays = {"images": data.train_images, "labels": data.train_labels}
    workers = (flags.num_workers or 1) if flags.async_dataloader else 0
    return ipu_jax.Feed(
        arrays if flags.eight_bit_io else _AsFloats(arrays),
        micro_batch=flags.batch_size,
        shuffle=flags.shuffle,
        seed=flags.seed,
        remainder="updates",
        prefetch=None if workers else 0,
        workers=workers or 1,
        **whom,
    )


class _AsFloats:
    """A data source of images as float32 from 0 to 1, and their labels, for feeds that don't send bytes."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["images"])

    def __getitem__(self, indices: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
        images, labels = self._arrays["images"], self._arrays["labels"]
        return {"images": ipu_jax.io.normalise(images.take(indices, axis=0)), "labels": labels[indices]}


def updates_in_words(flags: DataFlags, data: MNIST) -> str:
    """Describe an epoch in words, for the first line of output."""
    of_each = " on each" if flags.replicas > 1 else ""
    return (
        f"{len(data.train_images) // flags.images_per_update} updates per epoch, each of "
        f"{flags.gradient_accumulation_count} micro-batches of {flags.batch_size}{of_each}"
    )


class TrainingRun:
    """A training run in one mode. Making one compiles nothing and draws no weights.

    Raises:
        ValueError: flags that can't be combined.
    """

    def __init__(self, flags: Flags, mode: Mode, data: MNIST, devices: Sequence[Any] | None = None):
        self.flags, self.data = _with_epochs(flags, data), data
        self.defaults = _with_epochs(parsed(PROG, "", ["--model", flags.model], Flags)[1], data)
        learns_as_usual = all(getattr(self.flags, name) == getattr(self.defaults, name) for name in _LEARNING)
        self.expected = data.expected if learns_as_usual and flags.replicas == 1 else None
        self.mode: Mode = mode
        make = model.make_pipeline if flags.model == "mlp" else functools.partial(resnet.make_pipeline, flags.model)
        self._pixels = np.uint8 if flags.eight_bit_io else np.float32
        pipeline = make(
            mode,
            _shapes(self._pixels, np.uint8, flags.batch_size),
            ipus=flags.ipus_of(mode),
            replicas=flags.replicas,
            devices=devices,
            gradient_accumulation=flags.gradient_accumulation_count,
            schedule=flags.pipeline_schedule,
            reduction=flags.reduction,
        )
        options = ipu_jax.TrainOptions(
            device_iterations=flags.repeats_of(len(data.train_images)),
            outputs="all",
            precision=flags.precision,
            half=flags.half or "bfloat16",
            shard_optimizer=flags.shard_optimizer,
            loss_scale=ipu_jax.options.DynamicScale() if flags.half == "float16" else 1.0,
            on_nonfinite=flags.on_nonfinite,
        )
        name, rate = flags.optimizer, flags.learning_rate
        optimizer = optax.sgd(rate, 0.9) if name == "momentum" else getattr(optax, name)(rate)
        self.step = ipu_jax.make_train_step(pipeline, optimizer, options)
        network = model.loss_of(mode) if flags.model == "mlp" else resnet.loss_of(flags.model, mode, training=False)
        of_test = _shapes(np.uint8, np.int32, flags.batch_size)  # a label of -1 fills a batch up
        self._evaluation = functools.cache(lambda: self.step.model.forward(network, of_test))
        updates, steps = flags.updates_of(len(data.train_images)), flags.trace_steps or 3
        if flags.trace and updates <= steps:
            raise ValueError(
                f"--trace records {steps} updates after the first one, and the flags ask for {updates}: give more "
                "--epochs, or fewer --trace-steps"
            )
        folder = flags.trace / mode if flags.trace and flags.compare else flags.trace
        self.recording = None if folder is None else ipu_jax.observe.trace(folder, steps=steps)
        self.status, self.mend = 0, f"use a learning rate below {flags.learning_rate:g}"
        self.log = ipu_jax.observe.RunLog(flags.log_file, tensorboard=flags.tensorboard) if popdist.is_first() else None

    def compiled(self) -> ipu_jax.chips.ChipReport:
        """Compile a device call for the chips of the step's mesh, and report what it needs. Nothing is placed."""
        flags, k = self.flags, self.step.options.device_iterations
        dims = (*[k] * (k > 1), *[flags.replicas] * (flags.replicas > 1), flags.gradient_accumulation_count)
        batch, of_mlp = _shapes(self._pixels, np.uint8, *dims, flags.batch_size), lambda: (model.init_params(0), None)
        params, state = jax.eval_shape(of_mlp) if flags.model == "mlp" else resnet.shapes_of(flags.model)
        return ipu_jax.chips.compile_ahead(self.step, params, batch, state=state)

    def init(self) -> ipu_jax.steps.TrainState:
        """Return the first state, the same in both modes."""
        flags = self.flags
        if flags.model == "mlp":
            return self.step.init(model.init_params, np.uint32(flags.seed))  # each IPU makes its own
        return self.step.init(resnet.init_params(flags.model, flags.seed), stages=resnet.init_state(flags.model))

    def accuracy(self, state: ipu_jax.steps.TrainState) -> float:
        """Return the fraction of test images that the network classifies correctly, for any number of images."""
        data, pipeline = self.data, self.step.model
        arrays = {"images": data.test_images, "labels": data.test_labels.astype(np.int32)}
        correct = 0
        with ipu_jax.Feed(
            arrays,
            mesh=pipeline.mesh,
            gradient_accumulation=pipeline.options.gradient_accumulation,
            micro_batch=self.flags.batch_size,
            shuffle=False,
            remainder="pad",
            fill={"images": 0, "labels": -1},
        ) as feed:
            for batch in feed.epoch():
                _, aux = self._evaluation()(state.params, batch.data, state.stages)
                correct += int(ipu_jax.pipelines.on_host(aux["correct"]).sum())
        return correct / len(data.test_images)

    def checkpoints(self) -> ipu_jax.Checkpoints | None:
        """Return the checkpoints of the training; None if it is not saved."""
        flags, data = self.flags, self.data
        if flags.checkpoint_dir is None:
            return None
        crc = zlib.crc32(data.train_labels.tobytes(), zlib.crc32(data.train_images.tobytes()))
        must_be_the_same = {
            "model": flags.model,
            "data": f"{len(data.train_images):,} images, CRC-32 {crc:08x}",
            "images per update": flags.images_per_update,
            "seed": flags.seed,
            "shuffle": flags.shuffle,
            "optimizer": flags.optimizer,
            "precision": flags.precision + (f" {flags.half}" if flags.half else ""),
            "reduction": flags.reduction,
        }
        if flags.reduction == "sum":  # the size of an update grows with the number of micro-batches
            must_be_the_same["micro-batches per update"] = flags.gradient_accumulation_count * flags.replicas
        every, minutes = flags.checkpoint_every, flags.checkpoint_minutes
        if every is None and minutes is None:
            every, minutes = len(data.train_images) // flags.images_per_update, 10.0
        return ipu_jax.Checkpoints(
            flags.checkpoint_dir,
            self.step,
            keep=flags.keep or 3,
            every=every,
            minutes=minutes,
            describes=must_be_the_same,
            on_save_error=flags.on_save_error or "stop",
        )

    def needs(self, state: ipu_jax.steps.TrainState) -> ipu_jax.costs.PipelineReport:
        """Report what each IPU stores, computes and sends. It is compiled for `--explain` only."""
        m = self.step.gradient_accumulation
        with feed_of(self.flags, self.data, mesh=self.step.mesh, gradient_accumulation=m) as feed:
            return self.step.model.report(state.params, feed.like, state.stages, compile=self.flags.explain)

    def run(self, cache: ipu_jax.steps.ExecutableCache | None) -> ipu_jax.steps.FitResult:
        """Train, and print the output lines of the training."""
        flags, data, pipeline = self.flags, self.data, self.step.model
        network = "" if flags.model == "mlp" else flags.model.replace("resnet", "ResNet-") + " "
        replicas = f", {flags.replicas} replicas" if flags.replicas > 1 else ""
        say(
            f"{self.mode} {network}pipeline on {pipeline.ipus} IPU{'s' * (pipeline.ipus > 1)}{replicas}, "
            f"{flags.pipeline_schedule}; {data.source}: {updates_in_words(flags, data)}"
        )
        state = self.init()
        self._show_schedule(state)
        saving = self.checkpoints() or contextlib.nullcontext()
        with saving as checkpoints, feed_of(flags, data, step=self.step) as feed:
            result = ipu_jax.fit(
                self.step,
                state,
                feed,
                updates=flags.updates_of(len(data.train_images)),
                evaluate=lambda state: {"accuracy": self.accuracy(state)},
                checkpoints=checkpoints,
                resume=flags.resume or "auto",
                log=self.log,
                notes={
                    "mode": self.mode,
                    "model": flags.model,
                    "data": data.source,
                    "seed": flags.seed,
                    "flags": _plain(flags),
                    "defaults": _plain(self.defaults),
                    **({} if self.expected is None else {"expected": {"accuracy": self.expected}}),
                },
                trace=self.recording,
                report=flags.report,
                progress=False if flags.no_progress else None,
                say=say,
                title=f"{flags.model}, {self.mode}",
            )
        self._conclude(result)
        if cache is not None:
            say(str(cache))
        return result

    def _show_schedule(self, state: ipu_jax.steps.TrainState) -> None:
        """Print and draw the schedule and what it needs, if the flags ask for it."""
        flags, pipeline = self.flags, self.step.model
        is_auto, file = flags.pipeline_schedule == "auto", flags.picture_of(self.mode)
        needs = self.needs(state) if flags.explain or is_auto else None
        schedule = pipeline.schedule if needs is None else needs.timetable
        if flags.explain:
            say(f"{schedule}\n{needs}")
        if is_auto:
            say(f"Schedule auto chose {'a table of its own' if schedule.name == 'auto' else schedule.name}")
        if file is not None:
            self.write("--plot-schedule", file, lambda: schedule.plot(file), "Schedule")

    def _conclude(self, result: ipu_jax.steps.FitResult) -> None:
        """Print whether the training was good, and take the exit status from that."""
        has_no_page = self.flags.report is not None and popdist.is_first() and result.report is None
        if has_no_page or (result.stopped is None and not self.has_traced()):
            self.status = cli.CANNOT_WRITE  # fit has said why
        if not np.isfinite(result.losses[-1:]).all():  # of updates that --on-nonfinite skip left out
            say(f"the last loss is {result.losses[-1]}: training diverged; {self.mend}", is_error=True)
            self.status = self.status or 1
        elif result.stopped is None:
            accuracy = result.evaluations[-1][1]["accuracy"]
            say(judged(accuracy, self.expected, can_learn=self.data.expected is not None))

    def has_traced(self) -> bool:
        """Return whether a trace was recorded and written, if one was asked for."""
        with contextlib.suppress(ipu_jax.observe.TraceError):
            return self.recording is None or bool(self.recording.timeline)
        return False

    def write(self, flag: str, file: Path, write: Callable[[], object], what: str) -> None:
        """Write a file on the first instance, and report it. A failure to write does not stop the training."""
        if not popdist.is_first():
            return
        try:
            with popdist.busy(f"writing {file.name}"):
                write()
        except Exception as error:  # a fault in the file must not discard the training
            say(f"{flag} {file} was not written ({cli.reason_of(error)})", is_error=True)
            self.status = cli.CANNOT_WRITE
        else:
            say(f"{what}: {file}")


def judged(accuracy: float, expected: float | None, *, can_learn: bool = True) -> str:
    """Return the last line of a training run: its accuracy, and whether this is good, where it is known what is.

    >>> print(judged(0.976, 0.96))
    97.60% is good: 96% or more is expected
    >>> print(judged(0.8, 0.96))
    80.00% is less than the 96% or more that the default flags reach
    >>> print(judged(0.8, None))
    80.00% of the test images are classified correctly
    """
    if not can_learn:
        return f"{accuracy:.2%} is chance: these images cannot be learnt"
    if expected is None:
        return f"{accuracy:.2%} of the test images are classified correctly"
    if accuracy >= expected:
        return f"{accuracy:.2%} is good: {expected:.0%} or more is expected"
    return f"{accuracy:.2%} is less than the {expected:.0%} or more that the default flags reach"


def compile_all(flags: Flags) -> int:
    """Compile each mode for the chips of --compile-for, and return the exit status.

    Raises:
        ValueError: there is no such topology, it has too few chips, or XLA's compiler for it is not installed.
    """
    jax.config.update("jax_platforms", "cpu")  # no chip is needed, and none is looked for
    try:
        devices = ipu_jax.chips.describe(str(flags.compile_for))
    except ValueError as error:
        raise ValueError(str(error).replace("topology=", "--compile-for ")) from error
    reports = [TrainingRun(flags, mode, described(), devices).compiled() for mode in flags.modes]
    say("\n\n".join(map(str, reports)))
    return 0 if all(report.fits for report in reports) else 1


def train_all(flags: Flags, trainings: list[TrainingRun]) -> int:
    """Train in each mode, and return the exit status. With --compare, print and draw how far the losses are apart."""
    folder = flags.executable_cache
    try:
        with (
            cli.warnings_as_lines(PROG, *_WARNINGS, shown=popdist.is_first()),
            contextlib.nullcontext() if folder is None else ipu_jax.steps.ExecutableCache(folder) as cache,
        ):
            results = {each.mode: each.run(cache) for each in trainings}
    except ipu_jax.steps.NonFiniteLossError as error:
        say(f"{error.found or error}: training diverged; {trainings[0].mend}", is_error=True)
        cli.end_together()
        return 1
    except KeyboardInterrupt:  # fit has said how far it came, and whether it saved
        if flags.checkpoint_dir is None:
            folder = "--checkpoint-dir FOLDER" + ", without --compare" * flags.compare
            say(f"nothing was saved: give {folder}, and the same command goes on from there", is_error=True)
        raise
    except ipu_jax.io.CheckpointError as error:
        say(str(error) if isinstance(error, ipu_jax.io.SaveError) else f"--checkpoint-dir: {error}", is_error=True)
        cli.end_together()
        return cli.CANNOT_WRITE if isinstance(error, ipu_jax.io.SaveError) else 2
    finally:
        for each in trainings:
            if each.log is not None:
                each.log.close()
    if flags.compare:
        losses = {mode: result.losses for mode, result in results.items()}
        say(compared(losses["basic"], losses["concurrent"]))
        file = flags.picture
        trainings[0].write("--plot", file, lambda: draw(losses["basic"], losses["concurrent"], file), "Picture")
    return max(each.status for each in trainings)


def read(flags: DataFlags, data: MNIST) -> None:
    """Read all epochs onto the IPUs; print the source of the data, and a line after each epoch."""
    images = len(data.train_images)
    per_epoch, total, done = images // flags.images_per_update, flags.updates_of(images), 0
    replicas = f"{flags.replicas} replicas of " if flags.replicas > 1 else ""
    say(f"{data.source}, to {replicas}{flags.ipus} IPU{'s' * (flags.ipus > 1)}: {updates_in_words(flags, data)}")
    mesh, k = ipu_jax.make_mesh(flags.replicas, flags.ipus), flags.repeats_of(images)
    shown = popdist.is_first() and cli.shows_progress(False if flags.no_progress else None)
    feed = feed_of(flags, data, mesh=mesh, gradient_accumulation=flags.gradient_accumulation_count, device_iterations=k)
    whole, speeds = 0.0, list[float]()
    with feed, cli.Bar("reading", total, 0, flags.images_per_update, shown=shown) as bar:
        for epoch in range(-(-total // per_epoch)):
            end, before, megabytes = min(total, (epoch + 1) * per_epoch), done, 0.0
            cli.wait_for_all("the start of an epoch")
            start = time.perf_counter()
            for batch in feed.epoch():
                jax.block_until_ready(batch.arrays)
                made = min(batch.updates, end - done)
                of_all_instances = sum(leaf.nbytes for leaf in jax.tree.leaves(batch.arrays))
                megabytes += of_all_instances / 1e6 * made / k
                done += made
                bar.move(done)
                popdist.count_steps(updates=made, samples=made * flags.images_per_update)
                if done == end:
                    break
            cli.wait_for_all("the end of an epoch")  # an epoch takes as long as the slowest instance
            seconds, examples = time.perf_counter() - start, (done - before) * flags.images_per_update
            whole += seconds
            speeds.append(examples / seconds)
            say(
                f"Epoch {epoch + 1}: {examples:,.0f} samples in {seconds:.2f} s, {examples / seconds:,.0f} samples/s, "
                f"{megabytes / seconds:,.2f} MB/s"
            )
    if len(speeds) > 1:
        examples, speed = total * flags.images_per_update, statistics.median(speeds)
        say(f"In all: {examples:,} samples in {whole:.2f} s, {speed:,.0f} samples/s (median of epochs)")


def compared(basic: _Losses, concurrent: _Losses) -> str:
    """Return a line that says how far the losses of the two modes, each (updates,), are apart."""
    difference = _relative(basic, concurrent)
    first = difference[:_FIRST_UPDATES]
    # the loss of a skipped update may not be finite, and then has no difference
    return (
        f"Largest relative difference of the losses: {np.fmax.reduce(first):.1e} over the first {len(first)} updates, "
        f"{np.fmax.reduce(difference):.1e} over all {len(difference)}"
    )


def _relative(basic: _Losses, concurrent: _Losses) -> _Losses:
    with np.errstate(invalid="ignore"):
        return np.abs(concurrent - basic) / basic


def draw(basic: _Losses, concurrent: _Losses, path: Path) -> None:
    """Draw both curves, one thick and one dashed since they nearly coincide, and below them the relative difference.

    Raises:
        OSError: the PNG file cannot be written; an existing file is unchanged.
    """
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
    shown = np.maximum(_relative(basic, concurrent), 1e-9)
    differences.semilogy(updates, shown, color="#636363", linewidth=1, marker=mark)
    differences.set_ylabel("relative difference")
    differences.set_xlabel("weight updates")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    with cli.replacing(path) as file:
        figure.savefig(file, dpi=150, format="png")


def _shapes(pixels: npt.DTypeLike, labels: npt.DTypeLike, *dims: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"images": jax.ShapeDtypeStruct((*dims, 28, 28), pixels), "labels": jax.ShapeDtypeStruct(dims, labels)}


def _with_epochs(flags: Flags, data: MNIST) -> Flags:
    """Return the flags with the number of epochs that they mean for these images."""
    return dataclasses.replace(flags, epochs=flags.epochs_of(len(data.train_images)))


def _plain(flags: Flags) -> dict[str, Any]:
    """Return the flags as plain data."""
    named = {name.replace("_", "-"): value for name, value in sorted(vars(flags).items())}
    return {name: str(value) if isinstance(value, Path) else value for name, value in named.items()}
