"""Train block attention residuals: each stage attends to the inputs and to the outputs of all earlier stages.

    IPU 0   x -> block 0
    IPU 1          y0 -> block 1            each block reads x and all y before it
    IPU 2      y0, y1 -> block 2
    IPU 3  y0, y1, y2 -> block 3 -> loss

Run it: python -m examples.attention_residuals
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax import Outputs, Pipeline, Stage, configure, verify

STAGES, FEATURES, B, M = 4, 8, 16, 4


def attend(query, values):
    """Return a mix of values (stages, B, FEATURES), with weights of its own for each row (arXiv:2603.15031)."""
    keys = values / jnp.sqrt(jnp.mean(values**2, -1, keepdims=True) + 1e-6)
    return jnp.einsum("sb,sbd->bd", jax.nn.softmax(keys @ query, axis=0), values)


def block(number, p, x, microbatch, *, skips=None):
    mixed = microbatch["x"]
    if number > 0:  # x is the output of the previous stage
        mixed = attend(p["query"], jnp.stack([mixed, *(skips or {}).values(), x]))
    y = jax.nn.gelu(mixed @ p["up"]) @ p["down"]
    if number == STAGES - 1:
        return jnp.mean((y - microbatch["y"]) ** 2)
    return Outputs(y, skips={f"y{number}": y} if number < STAGES - 2 else {})


def make_pipeline(schedule: str) -> Pipeline:
    ipus = (0, 1, 1, 0) if schedule == "zbv" else range(STAGES)
    takes = [tuple(f"y{j}" for j in range(k - 1)) for k in range(STAGES)]
    stages = [Stage(functools.partial(block, k), f"block {k}", ipus[k], takes=takes[k]) for k in range(STAGES)]
    return Pipeline(stages, gradient_accumulation=M, schedule=schedule)


def make_data() -> tuple[dict, dict]:
    """Return weights, and a batch of M micro-batches of B rows."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=0.5, size=shape).astype(np.float32)
    shapes = {"query": (FEATURES,), "up": (FEATURES, 16), "down": (16, FEATURES)}
    weights = {f"block {k}": {name: draw(*shape) for name, shape in shapes.items()} for k in range(STAGES)}
    del weights["block 0"]["query"]  # it reads the inputs alone
    return weights, {"x": draw(M, B, FEATURES), "y": draw(M, B, FEATURES)}


def main() -> None:
    weights, batch = make_data()
    for schedule in ("1f1b", "zb-h1", "zbv"):
        pipeline = make_pipeline(schedule)
        print(f"{schedule}:", verify(pipeline, pipeline.shard(weights), batch))


if __name__ == "__main__":
    configure(4)
    main()
