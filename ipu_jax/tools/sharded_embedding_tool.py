"""sharded-embedding-tool: compare a tied embedding, sharded over IPUs as a pipeline, with the unsharded program.

    hidden = table[tokens]          table (vocabulary, features) with its rows split over the IPUs
    logits = hidden @ table.T       the same table: its gradients from both ends add up
    loss   = mean softmax cross-entropy of the logits with random targets

The three lines are three concurrent stages of an `ipu_jax.Pipeline`, written with `sharded_ops`. The tool computes the
loss and the table's gradient twice, by that pipeline on virtual IPUs and by plain jax and optax on one device, and
reports whether they agree. Its exit code is 0 if they do, 1 if they don't, and 2 if the arguments are impossible.

    $ sharded-embedding-tool --ipus 4 --vocab-size 8000 --feature-size 768 --sequence-length 256
    Loss on 4 IPUs: 8.9867
    Loss unsharded: 8.9867
    Results match.

The tolerances are those of numpy.allclose. The gradient of a mean over many tokens can be smaller than the absolute
tolerance of the half types, so that even a wrong one would pass. Therefore no gradient may differ by more than 5% of
its norm, either.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, IPU_AXIS, Pipeline, Stage, configure, make_mesh
from ipu_jax.tools._command_line import FLOAT32_TOLERANCE, HALF_TOLERANCE, Parser, Tolerance
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with these arguments, or those of the command line, and return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        configure(args.ipus)
        pipeline = make_pipeline(args.ipus, args.vocab_size)
        dtype = jnp.float16 if args.fp16 else jnp.bfloat16 if args.bf16 else jnp.float32
        inputs = random_inputs(args.vocab_size, args.feature_size, args.sequence_length, args.seed, dtype)
    except (ValueError, MemoryError) as error:
        parser.error(str(error))

    sharded = run_pipeline(pipeline, inputs)
    print(f"Loss on {args.ipus} IPU{'s' if args.ipus > 1 else ''}: {sharded.loss:.4f}")
    if not args.checks:
        return 0

    dense = jax.device_get(jax.jit(dense_program)(*inputs))
    print(f"Loss unsharded: {dense.loss:.4f}")
    differing = differences(sharded, dense, FLOAT32_TOLERANCE if dtype == jnp.float32 else HALF_TOLERANCE)
    for name, error in differing.items():
        print(f"Max ABS error: {error:.3g} ({name})")
    if differing:
        return 1
    print("Results match.")
    return 0


def random_inputs(vocabulary: int, features: int, length: int, seed: int, dtype: Any) -> Inputs:
    """Return a table of standard deviation 1/sqrt(features), as embeddings are initialised, and random tokens and
    targets.
    """
    rng = np.random.default_rng(seed)
    table = (rng.standard_normal((vocabulary, features)) / np.sqrt(features)).astype(dtype)
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


def _parser() -> Parser:
    parser = Parser(
        prog="sharded-embedding-tool",
        description="Compares a tied embedding, its projection and softmax cross-entropy, sharded over IPUs, with the "
        "unsharded program.",
    )

    parser.add_size("--ipus", 4, "IPUs to split the table over")
    parser.add_size("--vocab-size", 8000, "rows of the table")
    parser.add_size("--feature-size", 768, "columns of the table")
    parser.add_size("--sequence-length", 256, "tokens")
    parser.add_size("--seed", 42, "seed of the random inputs", least=0)
    parser.add_dtypes_and_checks("the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
