"""Test that plain dicts and lists say what is frozen, and how weights are split, in the trees of NNX and Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, make_mesh
from ipu_jax.nn import equinox_stage, nnx_stage


class Adapted(nnx.Module):
    def __init__(self):
        self.base, self.adapter = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 3, rngs=nnx.Rngs(1))
        self.layers = nnx.List([nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(2))])

    def __call__(self, x):
        return self.layers[0](self.base(x) + self.adapter(x))


def mean(y, microbatch):
    return jnp.mean(y**2)


def nnx_part(ipu=0):
    return nnx_stage(Adapted(), "g", ipu=ipu, inputs="x", loss=mean)


def equinox_part(ipu=0):
    return equinox_stage(eqx.nn.MLP(3, 3, 3, 1, key=jax.random.key(0)), "g", ipu=ipu, inputs="x", loss=mean)


# leaves of nnx_part: adapter/bias, adapter/kernel, base/bias, base/kernel, layers/0/kernel
# leaves of equinox_part: layers/0/weight, layers/0/bias, layers/1/weight, layers/1/bias
NNX_FROZEN = {"base": True, "adapter": False, "layers": [False]}, [0, 0, 1, 1, 0]
EQUINOX_FROZEN = {"layers": [{"weight": True, "bias": False}, True]}, [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("part", "frozen", "expected"),
    [
        (nnx_part, *NNX_FROZEN),
        (nnx_part, {"base": {"kernel": True, "bias": False}, "adapter": False, "layers": {0: True}}, [0, 0, 0, 1, 1]),
        (equinox_part, *EQUINOX_FROZEN),
        (equinox_part, {"layers": (False, True)}, [0, 0, 1, 1]),
    ],
)
def test_plain_dicts_say_what_is_frozen(part, frozen, expected):
    part = part()
    layout = Pipeline([part.stage], frozen={"g": frozen}).placement.weights.layout(part.params)
    assert layout.frozen == [bool(flag) for flag in expected]


def test_a_frozen_module_gets_no_gradient():
    part = nnx_part()
    pipeline = Pipeline([part.stage], frozen={"g": NNX_FROZEN[0]})
    _, gradients = pipeline.value_and_grad(pipeline.shard(part.params), {"x": jnp.ones((1, 2, 3))})
    moved = [bool(np.any(leaf)) for leaf in jax.tree.leaves(pipeline.unshard(gradients))]
    assert moved == [not frozen for frozen in NNX_FROZEN[1]]


@pytest.mark.parametrize(
    ("part", "specs", "split"),
    [
        (nnx_part, {"base": {"kernel": P(None, "ipu"), "bias": P("ipu")}, "adapter": P(), "layers": [P()]}, [2, 3]),
        (equinox_part, {"layers": [{"weight": P("ipu"), "bias": P("ipu")}, P()]}, [0, 1]),
    ],
)
def test_plain_dicts_say_how_weights_are_split(part, specs, split):
    part = part(ALL_IPUS)
    pipeline = Pipeline([part.stage], mesh=make_mesh(1, 2), specs={"g": specs})
    leaves = pipeline.shard(part.params).layout.leaves
    assert [k for k, leaf in enumerate(leaves) if leaf.split is not None] == split


@pytest.mark.parametrize(
    ("part", "frozen", "message"),
    [
        (
            nnx_part,
            {"base": True, "layers": False},
            "it says nothing for adapter/bias/value: name all leaves, or a node",
        ),
        (equinox_part, {"layers": [True, False], "activation": True}, "it names activation, which is not there"),
    ],
)
def test_dicts_of_another_tree_are_refused(part, frozen, message):
    part = part()
    with pytest.raises(ValueError, match=rf"^frozen\['g'\] does not fit the tree: {message}"):
        Pipeline([part.stage], frozen={"g": frozen}).shard(part.params)
