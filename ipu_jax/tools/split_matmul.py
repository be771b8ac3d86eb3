"""Compute a matmul, its cross-entropy and both gradients twice: with its columns split over IPUs, and on one device.

    logits = lhs @ rhs          lhs (rows, cols) on every IPU, rhs (cols, outsize) with its columns split over the IPUs
    loss   = mean softmax cross-entropy of the logits with random labels

Differences are judged as numpy.allclose judges them. The gradients of a mean over many rows are small, so an error of
0.01 passes in the half types. In effect, the half types test only the logits and the loss, and float32 tests all four.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ipu_jax import make_mesh
from ipu_jax.pipelines import IPU_AXIS
from ipu_jax.tools.agreement import Tolerance
from sharded_ops import Split, log_softmax_cross_entropy, matmul


class Results(NamedTuple):
    logits: Any
    loss: Any
    dLhs: Any
    dRhs: Any


def random_inputs(rows: int, cols: int, outsize: int, seed: int, dtype: DTypeLike) -> tuple[np.ndarray, ...]:
    """Return lhs like tanh activations, rhs like the initial weights of a dense layer, and a random label per row.

    So the logits have a standard deviation of 1/3 for all sizes. Practically none reaches 2, where neighbouring
    bfloat16 numbers are further apart than the tolerance of the half types.
    """
    rng = np.random.default_rng(seed)
    lhs = rng.uniform(-1, 1, (rows, cols)).astype(jnp.dtype(dtype))
    rhs = rng.uniform(-1 / np.sqrt(cols), 1 / np.sqrt(cols), (cols, outsize)).astype(jnp.dtype(dtype))
    return lhs, rhs, rng.integers(0, outsize, rows, dtype=np.int32)


def sharded_program(mesh: Mesh, outsize: int) -> Any:
    """Return a function (lhs, rhs, labels) -> Results, which splits rhs by columns over the mesh's IPUs."""
    split = Split(outsize, mesh.shape[IPU_AXIS])
    columns = split.spec(1, 2, IPU_AXIS)

    def each_ipu(lhs, rhs_shard, labels):
        logits_shard = matmul(lhs, rhs_shard, split="columns", size=outsize, axis=IPU_AXIS)
        return log_softmax_cross_entropy(logits_shard, labels, size=outsize, axis=IPU_AXIS).mean(), logits_shard

    on_ipus = jax.shard_map(each_ipu, mesh=mesh, in_specs=(P(), columns, P()), out_specs=(P(), columns))

    @jax.jit
    def program(lhs, rhs, labels):
        def loss_and_logits(lhs, rhs):
            return on_ipus(lhs, split.pad(rhs, 1), labels)

        (loss, logits), (dLhs, dRhs) = jax.value_and_grad(loss_and_logits, argnums=(0, 1), has_aux=True)(lhs, rhs)
        return Results(split.unpad(logits, 1), loss, dLhs, dRhs)

    return program


def run_sharded(ipus: int, inputs: tuple[np.ndarray, ...]) -> Results:
    """Return the results of `sharded_program` on this number of IPUs, as numpy arrays."""
    lhs, rhs, labels = inputs
    return jax.device_get(sharded_program(make_mesh(1, ipus), rhs.shape[1])(lhs, rhs, labels))


def run_dense(inputs: tuple[np.ndarray, ...]) -> Results:
    """Return the results of `dense_program`, as numpy arrays."""
    return jax.device_get(jax.jit(dense_program)(*inputs))


def dense_program(lhs: jax.Array, rhs: jax.Array, labels: jax.Array) -> Results:
    """Return the same results from one device, without `sharded_ops`."""

    def loss_and_logits(lhs, rhs):
        logits = lhs @ rhs
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return losses.mean(), logits

    (loss, logits), (dLhs, dRhs) = jax.value_and_grad(loss_and_logits, argnums=(0, 1), has_aux=True)(lhs, rhs)
    return Results(logits, loss, dLhs, dRhs)


def differences(got: Results, want: Results, tolerance: Tolerance) -> dict[str, float]:
    """Return the largest absolute error of each result that is out of tolerance, as NaN always is."""
    differing = {}
    for name in Results._fields:
        one, other = (np.asarray(getattr(results, name), np.float64) for results in (got, want))
        error = np.abs(one - other)
        if not np.all(error <= tolerance.atol + tolerance.rtol * np.abs(other)):
            differing[name] = float(error.max())
    return differing
