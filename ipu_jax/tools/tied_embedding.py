"""Compute the loss and the gradient of a tied embedding twice: as a pipeline of concurrent stages, and on one device.

    hidden = table[tokens]          table (vocabulary, features) with its rows split over the IPUs
    logits = hidden @ table.T       the same table: its gradients from both ends add up
    loss   = mean softmax cross-entropy of the logits with random targets

The three lines are three concurrent stages of a `Pipeline`, written with `sharded_ops`.

Differences are judged as numpy.allclose judges them. The gradient of a mean over many tokens can be smaller than the
absolute tolerance of the half types, so even a wrong gradient would pass. Therefore no gradient may differ by more than
5% of its norm either.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.pipelines import IPU_AXIS
from ipu_jax.tools.agreement import Tolerance
from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection

NORM_TOLERANCE = 0.05


class Results(NamedTuple):
    loss: Any
    gradient: Any


class Inputs(NamedTuple):
    """table: (vocabulary, features); tokens and targets: (sequence,) int32."""

    table: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray


def random_inputs(vocabulary: int, features: int, length: int, seed: int, dtype: DTypeLike) -> Inputs:
    """Return a table of standard deviation 1/sqrt(features), like initial embeddings, and random tokens and targets."""
    rng = np.random.default_rng(seed)
    table = (rng.standard_normal((vocabulary, features)) / np.sqrt(features)).astype(jnp.dtype(dtype))
    tokens, targets = rng.integers(0, vocabulary, (2, length), dtype=np.int32)
    return Inputs(table, tokens, targets)


def make_pipeline(ipus: int, vocabulary: int) -> Pipeline:
    """Return a pipeline of three stages on all IPUs; its batch is `{"tokens", "targets"}`, (1, sequence) each."""

    def embed(table: jax.Array, x: None, batch: dict[str, jax.Array]) -> jax.Array:
        return embedding(table, batch["tokens"], size=vocabulary)

    def project(table: jax.Array, x: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return tied_projection(x, table, size=vocabulary)

    def cross_entropy(params: None, logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return log_softmax_cross_entropy(logits, batch["targets"], size=vocabulary).mean()

    stages = [
        Stage(embed, params="table", ipu=ALL_IPUS, name="embedding"),
        Stage(project, params="table", ipu=ALL_IPUS, name="projection"),
        Stage(cross_entropy, ipu=ALL_IPUS, name="cross-entropy"),
    ]
    return Pipeline(stages, mesh=make_mesh(1, ipus), specs={"table": PartitionSpec(IPU_AXIS, None)})


def run_pipeline(pipeline: Pipeline, inputs: Inputs) -> Results:
    """Return the loss and the gradient of the whole table, as numpy arrays."""
    params = pipeline.shard({"table": inputs.table})
    batch = {"tokens": inputs.tokens[None], "targets": inputs.targets[None]}
    loss, gradients = pipeline.value_and_grad(params, batch)
    return Results(np.asarray(loss), np.asarray(pipeline.unshard(gradients)["table"]))


def run_dense(inputs: Inputs) -> Results:
    """Return the same results from one device, as numpy arrays."""
    return jax.device_get(jax.jit(dense_program)(*inputs))


def dense_program(table: jax.Array, tokens: jax.Array, targets: jax.Array) -> Results:
    """Return the same results from one device, without `ipu_jax` and `sharded_ops`."""

    def loss(table: jax.Array) -> jax.Array:
        logits = table[tokens] @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()

    return Results(*jax.value_and_grad(loss)(table))


def differences(got: Results, want: Results, tolerance: Tolerance) -> dict[str, float]:
    """Return the largest absolute error of each result that is out of tolerance, as NaN always is."""
    differing = {}
    for name in Results._fields:
        one, other = (np.asarray(getattr(results, name), np.float64) for results in (got, want))
        error = np.abs(one - other)
        within = np.all(error <= tolerance.atol + tolerance.rtol * np.abs(other))
        # A gradient that is exactly zero, as with a vocabulary of one row, has no norm to compare with.
        near = np.linalg.norm(error) <= NORM_TOLERANCE * np.linalg.norm(other) or not np.any(other)
        if not (within and near):
            differing[name] = float(error.max())
    return differing
