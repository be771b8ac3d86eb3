"""Cut functions with shardings of their own, inside the user's `jax.set_mesh`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from ipu_jax import Pipeline, verify
from support.dense import largest_relative_error
from support.inputs import normal
from support.refusals import refused

PARAMS = [normal((8, 8), seed=k) / 3 for k in range(4)]
BATCH = np.asarray(normal((2, 4, 8), seed=9))


def users_mesh(kind, **axes):
    devices = jax.devices()[: sum(axes.values()) if max(axes.values()) > 1 else 1]
    return jax.set_mesh(jax.make_mesh((*axes.values(),), (*axes,), axis_types=(kind,) * len(axes), devices=devices))


def loss_with(product):
    """Return a loss whose products are sharded in some way."""

    def loss(params, x):
        for w in params:
            x = jax.nn.gelu(product(x, w))
        return jnp.mean(x**2)

    return loss


WHOLE = loss_with(lambda x, w: jnp.dot(x, w, out_sharding=PartitionSpec()))
SPLIT = loss_with(lambda x, w: jnp.dot(x, w, out_sharding=PartitionSpec("data")))
CONSTRAINED = loss_with(lambda x, w: jax.lax.with_sharding_constraint(x @ w, PartitionSpec("data")))
PLAIN = loss_with(jnp.matmul)


def cut(loss, **how):
    return Pipeline.from_function(loss, PARAMS, BATCH[0], ipus=2, gradient_accumulation=2, **how)


@pytest.mark.fast("Explicit, whole")
@pytest.mark.parametrize(
    ("kind", "loss"),
    [(AxisType.Explicit, WHOLE), (AxisType.Auto, WHOLE), (AxisType.Auto, CONSTRAINED)],
    ids=["Explicit, whole", "Auto, whole", "Auto, split"],
)
def test_shardings_over_axes_of_size_1_are_cut(kind, loss):
    with users_mesh(kind, data=1, model=1):
        pipeline = cut(loss)
    expected, of_loss = jax.value_and_grad(lambda p: (PLAIN(p, BATCH[0]) + PLAIN(p, BATCH[1])) / 2)(PARAMS)
    params = pipeline.shard(PARAMS)
    value, gradients = pipeline.value_and_grad(params, BATCH)  # outside of the context, too
    assert largest_relative_error((value, pipeline.unshard(gradients)), (expected, of_loss)) < 1e-5
    verify(pipeline, params, BATCH)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_function_without_shardings_ignores_the_context(kind):
    with users_mesh(kind, data=2):
        assert dict(cut(PLAIN).mesh.shape) == {"replica": 1, "ipu": 2}


@pytest.mark.parametrize("loss", [WHOLE, CONSTRAINED], ids=["whole", "split"])
def test_larger_axes_are_refused_with_what_to_give(loss):
    with users_mesh(AxisType.Auto, data=2, model=1):
        with refused("loss needs the mesh of jax.set_mesh", "data=2, model=1", "replicas=", "axes={'data': 2, 'model"):
            cut(loss)
        assert dict(cut(loss, axes={"data": 2, "model": 1}).mesh.shape)["data"] == 2


def test_explicit_axes_are_refused_with_what_to_write():
    with users_mesh(AxisType.Explicit, data=1), refused("test_users_mesh.py:", "'data' as an Explicit axis", "P()"):
        cut(SPLIT)


def test_the_pipelines_own_mesh_can_be_the_context():
    pipeline = cut(PLAIN)
    with jax.set_mesh(pipeline.mesh):
        assert cut(PLAIN).mesh == pipeline.mesh
