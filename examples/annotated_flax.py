"""Run a Flax linen transformer whose kernels have annotations, on two IPUs of two devices each.

    IPU 0   device 0, device 1   x -> block         Of each block, a device has half of the heads and of the
    IPU 1   device 2, device 3         -> block     hidden units. XLA adds the communication.

Run it: python -m examples.annotated_flax
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import PartitionSpec

from ipu_jax import Pipeline, configure, make_mesh, verify

FEATURES, HEADS, TOKENS, B, M = 16, 4, 6, 2, 4
whole = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec())


def dense(features: int, *axes: str | None) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), axes))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        normed, heads = nn.LayerNorm()(whole(x)), (*x.shape[:-1], HEADS, -1)
        q, k, v = (dense(FEATURES, None, "tensor")(normed).reshape(heads) for _ in range(3))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = whole(x + dense(FEATURES, "tensor", None)(attended))
        hidden = nn.gelu(dense(4 * FEATURES, None, "tensor")(nn.LayerNorm()(x)))
        return whole(x + dense(FEATURES, "tensor", None)(hidden))


blocks = nn.Sequential([Block(), Block()])


def loss(params, micro_batch):
    y: Any = blocks.apply({"params": params}, micro_batch["x"])
    return ((y - micro_batch["y"]) ** 2).mean()


def init(key) -> Any:
    with jax.sharding.use_abstract_mesh(make_mesh(1, 2, tensor=2).abstract_mesh):
        return blocks.init(key, np.zeros((B, TOKENS, FEATURES), np.float32))["params"]


def make_pipeline() -> Pipeline:
    boxed, x = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((B, TOKENS, FEATURES), np.float32)
    options: Any = {"ipus": 2, "axes": {"tensor": 2}, "specs": nn.get_partition_spec(boxed), "gradient_accumulation": M}
    return Pipeline.from_function(loss, nn.unbox(boxed), {"x": x, "y": x}, **options)


def main() -> None:
    pipeline, random = make_pipeline(), np.random.default_rng(0)
    params = pipeline.init(lambda key: nn.unbox(init(key)), jax.random.key(0))
    batch = {name: random.normal(size=(M, B, TOKENS, FEATURES)).astype(np.float32) for name in "xy"}
    print(verify(pipeline, params, batch))
    before, gradients = pipeline.value_and_grad(params, batch)
    params = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients)
    print(f"loss {before:.3f}, and {pipeline.loss(params, batch):.3f} after a step")


if __name__ == "__main__":
    configure(4)
    main()
