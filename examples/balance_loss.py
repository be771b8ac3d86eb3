"""Train a mixture of experts whose balance loss is added in every stage, under DualPipeV: two stages per IPU, folded.

    IPU 0   x -> experts 0 \\                              / experts 3 -> loss
    IPU 1                   -> experts 1 -> experts 2 ->
                    each stage adds its own balance loss

Run it: python -m examples.balance_loss
"""

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax import Outputs, Pipeline, Stage, configure, verify

STAGES, EXPERTS, FEATURES, B, M = 4, 4, 8, 16, 6


def experts(p, x, microbatch):
    """Add to each row the output of its expert; return the balance loss of Fedus et al. 2021 (arXiv:2101.03961)."""
    x = microbatch["x"] if x is None else x
    chances = jax.nn.softmax(x @ p["router"])
    chosen = jax.nn.one_hot(chances.argmax(-1), EXPERTS)
    outputs = jnp.einsum("beh,ehd->bed", jax.nn.gelu(jnp.einsum("bd,edh->beh", x, p["up"])), p["down"])
    balance = EXPERTS * jnp.sum(chosen.mean(0) * chances.mean(0))
    return Outputs(x + jnp.einsum("be,be,bed->bd", chosen, chances, outputs), loss=0.01 * balance)


def last_experts(p, x, microbatch):
    result = experts(p, x, microbatch)
    return Outputs(jnp.mean((result.y - microbatch["y"]) ** 2), loss=result.loss)


def make_pipeline(schedule: str) -> Pipeline:
    functions, ipus = [experts] * (STAGES - 1) + [last_experts], (0, 1, 1, 0)
    stages = [Stage(fn, f"experts {k}", ipus[k]) for k, fn in enumerate(functions)]
    return Pipeline(stages, gradient_accumulation=M, schedule=schedule)


def make_data() -> tuple[dict, dict]:
    """Return weights, and a batch of M micro-batches of B rows."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=0.5, size=shape).astype(np.float32)
    shapes = {"router": (FEATURES, EXPERTS), "up": (EXPERTS, FEATURES, 16), "down": (EXPERTS, 16, FEATURES)}
    weights = {f"experts {k}": {name: draw(*shape) for name, shape in shapes.items()} for k in range(STAGES)}
    return weights, {"x": draw(M, B, FEATURES), "y": draw(M, B, FEATURES)}


def main() -> None:
    weights, batch = make_data()
    pipeline = make_pipeline("dualpipev")
    print("dualpipev:", verify(pipeline, pipeline.shard(weights), batch))


if __name__ == "__main__":
    configure(2)
    main()
