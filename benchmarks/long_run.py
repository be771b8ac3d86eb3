"""Train a GPT for 3,000 updates on one device and on 4 IPUs, and compare the curves of the losses.

The protocol is torchtitan's (its docs/converging.md): a run that is trusted is the control, and a run that should learn
the same is compared with it over 3,000 updates, with the same weights, data and optimizer. Control is plain `jax.jit`
of loss, gradients and optax on one device, with each batch whole. Beside it train pipelines that
`Pipeline.from_function` cuts out of the same loss: under "1f1b", under "zb-h1", and under "1f1b" in bfloat16
(`precision="16.32"`). With `exact=True` the losses of both schedules have the same bits. Another run on one device
begins with weights that are one rounding error off. Its distance from control is what rounding alone makes of 3,000
updates.

The model is the one of `gpt.py`, with one table for embedding and projection. The text is this repository's own pages,
as bytes. A curve is the mean loss of the last 50 updates, in nats per byte; a difference of curves is relative.

    python benchmarks/long_run.py [--check] [--updates N] [--width D] [--layers L]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import gpt
from figures import Figures
from ipu_jax import Pipeline, TrainOptions, configure, make_train_step

DOCS = Path(__file__).parents[1] / "docs"
IPUS, MICRO_BATCHES, SEQUENCES, LENGTH, HEADS = 4, 4, 1, 64, 4
WINDOW = 50  # updates of which a point of a curve is the mean
CONTROL, ROUNDED = "one device", "one device, one rounding error off"
HALF = "1f1b, bfloat16"
# runs on 4 IPUs: schedule, precision, and the bound for the difference of the curves
RUNS: dict[str, tuple[str, Any, float]] = {
    "1f1b": ("1f1b", "32.32", 0.003),
    "zb-h1": ("zb-h1", "32.32", 0.003),
    HALF: ("1f1b", "16.32", 0.02),
}

Update = Callable[[Any], float]  # makes an update with a batch, and returns the loss before it


def batches_of(updates: int, seed: int = 2) -> Callable[[int], dict[str, np.ndarray]]:
    """Return a function of the update that gives its batch: pieces of the pages, (M, B, T) int32 each."""
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(DOCS.rglob("*.md"))), np.uint8).astype(np.int32)
    starts = np.random.default_rng(seed).integers(len(text) - LENGTH, size=(updates, MICRO_BATCHES, SEQUENCES, 1))

    def batch(update: int) -> dict[str, np.ndarray]:
        pieces = text[starts[update] + np.arange(LENGTH + 1)]
        return {"tokens": pieces[..., :-1], "targets": pieces[..., 1:]}

    return batch


def optimizer_of(updates: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(updates // 20, 1), updates)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def on_one_device(params: Any, optimizer: optax.GradientTransformation) -> Update:
    def update(params: Any, state: Any, batch: Any) -> Any:
        whole = jax.tree.map(lambda leaf: leaf.reshape(-1, LENGTH), batch)
        loss, gradients = jax.value_and_grad(gpt.loss_of)(params, whole)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    compiled, carried = jax.jit(update), (params, optimizer.init(params))

    def call(batch: Any) -> float:
        nonlocal carried
        carried, loss = compiled(*carried, batch)
        return float(loss)

    return call


def on_ipus(params: Any, optimizer: optax.GradientTransformation, batch: Any, schedule: str, precision: Any) -> Update:
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    pipeline = Pipeline.from_function(
        gpt.loss_of, params, one, ipus=IPUS, schedule=schedule, gradient_accumulation=MICRO_BATCHES
    )
    step = make_train_step(pipeline, optimizer, TrainOptions(precision=precision, exact=True))
    state = step.init(params)

    def call(batch: Any) -> float:
        nonlocal state
        state, outputs = step(state, batch)
        return float(outputs.loss)

    return call


def curve_of(losses: np.ndarray) -> np.ndarray:
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, "valid")


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=_updates, default=3000, help="updates of each run (default: %(default)s)")
    parser.add_argument(
        "--width", type=_multiple, default=128, help="features of a token, a multiple of 4 (default: %(default)s)"
    )
    parser.add_argument("--layers", type=_multiple, default=4, help="blocks, a multiple of 4 (default: %(default)s)")


def _updates(text: str) -> int:
    if int(text) < WINDOW:
        raise argparse.ArgumentTypeError(f"{text} updates are no curve: give at least {WINDOW}, the window of a mean")
    return int(text)


def _multiple(text: str) -> int:
    if int(text) < 1 or int(text) % IPUS or int(text) % HEADS:
        raise argparse.ArgumentTypeError(f"{text} cannot be divided by {IPUS} IPUs and {HEADS} heads: give a multiple")
    return int(text)


def main() -> int:
    figures = Figures("losses of a GPT over a long run: one device beside 4 IPUs", flags=flags)
    figures.shrink(__name__, WINDOW=2, LENGTH=8)
    args = figures.args
    updates, width, layers = (4, 8, 4) if args.smallest else (args.updates, args.width, args.layers)
    configure(IPUS)
    sizes = gpt.Sizes(vocabulary=256, length=LENGTH, features=width, heads=HEADS, layers=layers)
    params, optimizer, batch = gpt.init_params(sizes, IPUS), optimizer_of(updates), batches_of(updates)
    figures.add("parameters", sum(leaf.size for leaf in jax.tree.leaves(params)))
    nearby = jax.tree.map(lambda w: w * (1 + np.finfo(w.dtype).eps), params)
    made = {CONTROL: on_one_device(params, optimizer), ROUNDED: on_one_device(nearby, optimizer)}
    for name, (schedule, precision, _) in RUNS.items():
        made[name] = on_ipus(params, optimizer, batch(0), schedule, precision)
    losses = {name: np.asarray([update(batch(k)) for k in range(updates)]) for name, update in made.items()}
    curves = {name: curve_of(of_run) for name, of_run in losses.items()}
    for name, curve in curves.items():
        figures.add(f"loss of the last {WINDOW} of {updates} updates, {name}", curve[-1])
    for name, curve in curves.items():
        if name != CONTROL:
            bound = RUNS[name][-1] if name in RUNS else None
            difference = np.maximum.accumulate(abs(curve / curves[CONTROL] - 1))
            figures.add(f"largest relative difference of {updates} smoothed losses, {name}", difference[-1], bound)
            figures.add_curve(name, difference[::WINDOW])
    differing = int((losses["1f1b"] != losses["zb-h1"]).sum())
    figures.add("updates whose loss differs in a bit, zb-h1 / 1f1b", differing, 0)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
