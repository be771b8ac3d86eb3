"""Measure what a first call takes before anything runs: tracing, compiling, and how many kernels XLA makes.

A GPT of 4, 8 and 24 blocks on 4 virtual IPUs, as one function that is cut and as stages by hand, beside plain jit's
program of the same accumulated step. Each is traced and compiled in a process of its own, which has done neither
before; of some such processes the least CPU time counts. Cutting comes before tracing, and is a figure of its own.

    python benchmarks/first_call.py [--check]
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import from_function
from figures import Figures, largest_relative_difference, scanned
from from_function import IPUS, MICRO_BATCHES, init_params, loss, one_of
from gpt import Sizes, random_batch
from ipu_jax import Pipeline, configure
from program_text import kernels

LAYERS, WAYS, SCHEDULE = (4, 8, 24), ("cut", "by hand"), "1f1b"
BOUNDS = {"trace": 1.5, "compile": 2.0, "kernels": 1.5}  # of a cut function of 8 layers
PROCESSES = 3
ITSELF = "IPU_JAX_FIRST_CALL"


def first_call(way: str, layers: int) -> dict[str, float]:
    """Trace and compile the step in one way, and return what it took."""
    configure(IPUS)
    from_function.SIZES = Sizes(vocabulary=256, length=32, features=64, heads=4, layers=layers)
    params, batch = init_params(from_function.SIZES), random_batch(from_function.SIZES, MICRO_BATCHES, 2)
    plain, found = jax.jit(scanned(loss)), dict[str, float]()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # what the first program of a process takes

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begun = time.process_time()
        result = call()
        found[name] = time.process_time() - begun
        return result

    if way == "cut":
        options: dict[str, Any] = {"ipus": IPUS, "schedule": SCHEDULE, "gradient_accumulation": MICRO_BATCHES}
        pipeline = timed("cut", lambda: Pipeline.from_function(loss, params, one_of(batch), **options))
    else:
        pipeline = from_function.by_hand(SCHEDULE, tied=True)
    given = pipeline.shard(params if way == "cut" else from_function.in_groups(params))
    lower = (lambda: plain.lower(params, batch)) if way == "plain jit" else lambda: pipeline.lower(given, batch)
    lowered = timed("trace", lower)
    found["kernels"] = kernels(timed("compile", lowered.compile).as_text())
    if way == "cut":
        value, gradients = pipeline.value_and_grad(given, batch)
        result = jax.tree.map(np.asarray, (value, pipeline.unshard(gradients)))
        found["difference"] = largest_relative_difference(result, plain(params, batch))
    return found


def measured(way: str, layers: int) -> dict[str, float]:
    """Return the least of what processes took."""
    environment, found = {**os.environ, ITSELF: json.dumps([way, layers])}, list[dict[str, float]]()
    for _ in range(PROCESSES):
        ended = subprocess.run([sys.executable, __file__], check=True, env=environment, stdout=subprocess.PIPE)
        found.append(json.loads(ended.stdout.splitlines()[-1]))
    return {name: min(one[name] for one in found) for name in found[0]}


def main() -> int:
    figures = Figures("a first call: tracing, compiling and kernels, beside plain jit's")
    figures.shrink(__name__, LAYERS=LAYERS[:1], WAYS=WAYS[:1], PROCESSES=1)
    for layers in LAYERS:
        plain = measured("plain jit", layers)
        for name, value in plain.items():
            figures.add(f"{_SAID[name]}, plain jit, {layers} layers", value)
        for way in WAYS:
            found = measured(way, layers)
            if way == "cut":
                of = f"loss and gradients of the cut function / plain jit, {layers} layers, relative difference"
                figures.add(of, found["difference"], 1e-5)
                figures.add(f"CPU seconds to cut, {layers} layers", found["cut"])
            bounds = BOUNDS if (way, layers) == ("cut", 8) else {}
            for name, least in plain.items():
                figures.add(f"{_SAID[name]} / plain jit, {way}, {layers} layers", found[name] / least, bounds.get(name))
    return figures.status()


_SAID = {"trace": "CPU seconds to trace", "compile": "CPU seconds to compile", "kernels": "kernels"}


if __name__ == "__main__":
    if ITSELF in os.environ:
        print(json.dumps(first_call(*json.loads(os.environ[ITSELF]))))
        raise SystemExit(0)
    raise SystemExit(main())
