"""Train a small pipeline with checkpoints, print its progress, and fail on demand: the program that `faults.py` starts.

    mark=joined instance=0 attempt=0 t=812.331 value=
    mark=step instance=0 attempt=0 t=814.2 value=12:0x1.8p-2

The marks are, in this order: meeting, joined, resumed, compiling, tracing, step (with its loss), saving, saved, sealed,
stopped, closing, weights (a digest).

The environment variable FAULT can name a fault that cannot be made from outside: an exception, or a C function that
locks the interpreter, at a mark of one instance in the first attempt.
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Checkpoints, Feed, Pipeline, Stage, configure, make_mesh, make_train_step, popdist
from ipu_jax.io import CheckpointWarning
from ipu_jax.steps import StopRequest

ROWS, MICRO_BATCHES = 8, 2


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of this program's own.

    Attributes:
        how: "raise" or "lock".
        instance: the number of the instance that fails.
        mark: the name of the mark at which it fails, such as "step".
        value: which of several marks of that name, such as the number of the step; None for the first.
        delay: seconds after the mark.
    """

    how: str
    instance: int
    mark: str
    value: int | None
    delay: float

    def strike(self) -> None:
        """Make the fault."""
        time.sleep(self.delay)
        say("fault", self.how)
        if self.how == "raise":
            raise ArithmeticError("a fault of the training program's own")
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # other threads receive them: sleep() goes on
        ctypes.PyDLL(None).sleep(3600)  # PyDLL, unlike CDLL, keeps the interpreter's lock


def fault_of_this_attempt() -> Fault | None:
    text = os.environ.get("FAULT")
    first = os.environ.get("IPU_JAX_ATTEMPT", "0") == "0"
    return Fault(**json.loads(text)) if text and first else None


FAULT = fault_of_this_attempt()


def mark(name: str, value: Any = None, number: int | None = None) -> None:
    """Print where this instance is, and fail here if the fault says so."""
    say(name, value)
    if FAULT and (FAULT.mark, FAULT.instance) == (name, popdist.get_instance_index()) and FAULT.value in (None, number):
        FAULT.strike()


def say(name: str, value: Any) -> None:
    """Print a mark with the time of the monotonic clock, which all processes of a host share."""
    attempt, shown = os.environ.get("IPU_JAX_ATTEMPT", "0"), "" if value is None else value
    instance = popdist.get_instance_index()
    print(f"mark={name} instance={instance} attempt={attempt} t={time.monotonic():.6f} value={shown}", flush=True)


def step_of(width: int) -> Any:
    """Return the training step of two dense stages, of `width` x `width` weights each, on all IPUs of all instances."""

    def body(p: Any, x: Any, batch: Any) -> Any:
        mark_tracing()
        return jnp.tanh(batch["x"] @ p["w"])

    def head(p: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x @ p["w"] - batch["y"]) ** 2)

    ipus = popdist.get_num_ipus_per_replica()
    stages = [Stage(body, params="body", ipu=0), Stage(head, params="head", ipu=ipus - 1)]
    mesh = make_mesh(popdist.get_num_total_replicas(), ipus)
    return make_train_step(Pipeline(stages, mesh=mesh, gradient_accumulation=MICRO_BATCHES), optax.adam(1e-3))


traced = False


def mark_tracing() -> None:
    global traced
    if not traced:
        traced = True
        mark("tracing")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--updates", type=int, default=48)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between two steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true", help="save each step that is due again, once it is sealed")
    args = parser.parse_args()
    warnings.simplefilter("always", CheckpointWarning)
    mark("meeting")
    popdist.init(timeout=10)
    mark("joined")
    configure(popdist.get_num_local_ipus())
    train(args)
    return 0


def train(args: argparse.Namespace) -> None:
    step, draw = step_of(args.width), np.random.default_rng(args.seed)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    examples = {"x": normal(512, args.width), "y": normal(512, args.width)}
    state = step.init({name: {"w": normal(args.width, args.width) / args.width} for name in ("body", "head")})
    keep = {"keep": 2, "every": args.every, "describes": {"seed": args.seed}}
    with StopRequest() as stop, Checkpoints(args.folder, step, **keep) as checkpoints:
        checkpoints.lock()  # as `fit` does
        found = checkpoints.restore(state)
        state = state if found is None else found.state
        done = 0 if found is None else found.step
        mark("resumed", done)
        batches = {"micro_batch": ROWS, "gradient_accumulation": MICRO_BATCHES, "seed": args.seed}
        with Feed(examples, mesh=step.model.mesh, state=found and found.feed, **batches) as feed:
            mark("compiling")
            state, is_stopped = loop(args, step, state, feed, checkpoints, stop, done)
        mark("closing")
    if not is_stopped:
        leaves = jax.tree.leaves(step.whole(state)["params"])
        mark("weights", hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest())


def loop(
    args: argparse.Namespace, step: Any, state: Any, feed: Feed, checkpoints: Checkpoints, stop: StopRequest, done: int
) -> tuple[Any, bool]:
    """Run the remaining steps; return the last state, and whether SIGTERM stopped the loop."""
    sealed = None
    while done < args.updates:
        state, outputs = step(state, next(feed))
        done += 1
        if FAULT and FAULT.mark == "running":
            mark("running", done, done)  # the step has been dispatched, but not waited for
        mark("step", f"{done}:{float(outputs.loss).hex()}", done)
        is_due, is_stopped = checkpoints.due(state), stop.due()
        if is_due or is_stopped:
            mark("saving", done)
            checkpoints.save(state, feed, now=True)
            mark("saved", done, done)
            if args.twice:
                checkpoints.wait()
                mark("sealed", done)
                checkpoints.save(state, feed, extra="again", now=True)
        if checkpoints.last not in (None, sealed):
            sealed = checkpoints.last
            mark("sealed", sealed)
        if is_stopped:
            mark("stopped", done)
            return state, True
        time.sleep(args.pause)
    return state, False


if __name__ == "__main__":
    sys.exit(main())
