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
from typing import Any

import jax
import numpy as np

import from_function
from figures import Figures, largest_relative_difference, scanned
from gpt import Sizes, random_batch
from ipu_jax import Pipeline, configure
from program_text import kernels

LAYERS, WAYS, SCHEDULE = (4, 8, 24), ("plain jit", "cut", "by hand"), "1f1b"
BOUNDED, PROCESSES = 8, 3  # layers whose times have bounds
ITSELF = "IPU_JAX_FIRST_CALL"


def first_call(way: str, layers: int) -> dict[str, float]:
    """Trace and compile the step in one way, and return what it took."""
    configure(from_function.IPUS)
    from_function.SIZES = Sizes(vocabulary=256, length=32, features=64, heads=4, layers=layers)
    params = from_function.init_params(from_function.SIZES)
    batch = random_batch(from_function.SIZES, from_function.MICRO_BATCHES, 2)
    plain = jax.jit(scanned(from_function.loss))
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # what the first program of a process takes
    times, begun, pipeline = {}, time.process_time(), None
    if way == "cut":
        one = from_function.one_of(batch)
        options: dict[str, Any] = {"schedule": SCHEDULE, "gradient_accumulation": from_function.MICRO_BATCHES}
        pipeline = Pipeline.from_function(from_function.loss, params, one, ipus=from_function.IPUS, **options)
    elif way == "by hand":
        pipeline, params = from_function.by_hand(SCHEDULE, tied=True), from_function.in_groups(params)
    times["cut"], arguments = time.process_time() - begun, (params, batch)
    if pipeline is not None:
        arguments = (pipeline.shard(params), batch)
    begun = time.process_time()
    lowered = plain.lower(*arguments) if pipeline is None else pipeline.lower(*arguments)
    times["trace"], begun = time.process_time() - begun, time.process_time()
    compiled = lowered.compile()
    times["compile"] = time.process_time() - begun
    found = times | {"kernels": kernels(compiled.as_text())}
    if way == "cut":
        value, gradients = pipeline.value_and_grad(*arguments)
        result, expected = (value, pipeline.unshard(gradients)), plain(params, batch)
        found["difference"] = largest_relative_difference(jax.tree.map(np.asarray, result), expected)
    return found


def measured(way: str, layers: int) -> dict[str, float]:
    """Return the least of what processes took."""
    found = []
    for _ in range(PROCESSES if layers == BOUNDED else 1):
        environment = {**os.environ, ITSELF: json.dumps([way, layers])}
        output = subprocess.run([sys.executable, __file__], check=True, env=environment, stdout=subprocess.PIPE).stdout
        found.append(json.loads(output.splitlines()[-1]))
    return {name: min(one[name] for one in found) for name in found[0]}


def main() -> int:
    figures = Figures("a first call: tracing, compiling and kernels, beside plain jit's")
    figures.shrink(__name__, LAYERS=(4,), WAYS=WAYS[:2], PROCESSES=1)
    for layers in LAYERS:
        plain, *others = (measured(way, layers) for way in WAYS)
        figures.add(f"kernels, plain jit, {layers} layers", plain["kernels"])
        for name in ("trace", "compile"):
            figures.add(f"CPU seconds to {name}, plain jit, {layers} layers", plain[name])
        for way, found in zip(WAYS[1:], others, strict=True):
            if "difference" in found:
                figures.add(f"loss and gradients / plain jit, {layers} layers, difference", found["difference"], 1e-5)
            bounds = {"trace": 1.5, "compile": 2.0, "kernels": 2.0} if (way, layers) == ("cut", BOUNDED) else {}
            figures.add(f"kernels / plain jit, {way}, {layers} layers", found["kernels"] / plain["kernels"], bounds.get("kernels"))
            for name in ("trace", "compile"):
                ratio = found[name] / plain[name]
                figures.add(f"CPU time to {name} / plain jit, {way}, {layers} layers", ratio, bounds.get(name))
            figures.add(f"CPU seconds to cut, {way}, {layers} layers", found["cut"]) if way == "cut" else None
    return figures.status()


if __name__ == "__main__":
    if ITSELF in os.environ:
        print(json.dumps(first_call(*json.loads(os.environ[ITSELF]))))
        raise SystemExit(0)
    raise SystemExit(main())
