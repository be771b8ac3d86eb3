"""sharded-embedding-tool: compare a tied embedding, sharded over IPUs as a pipeline, with the unsharded program.

    hidden = table[tokens]          table (vocabulary, features) with its rows split over the IPUs
    logits = hidden @ table.T       the same table: its gradients from both ends add up
    loss   = mean softmax cross-entropy of the logits with random targets

The three lines are three concurrent stages of an `ipu_jax.Pipeline`, written with `sharded_ops`. The tool computes the
loss and the table's gradient twice, with that pipeline on virtual IPUs and with plain jax and optax on one device, and
reports whether they agree. Its exit code is 0 if they do, 1 if they don't, and 2 if the arguments are impossible.
Arguments are checked before jax is imported.

    $ sharded-embedding-tool --ipus 4 --vocab-size 8000 --feature-size 768 --sequence-length 256
    Loss on 4 IPUs: 8.9867
    Loss unsharded: 8.9867
    Results match.

The gradient of a mean over many tokens can be smaller than the absolute tolerance of the half types, so even a wrong
gradient would pass. Therefore no gradient may differ by more than 5% of its norm either.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from ipu_jax import cli
from ipu_jax.tools.comparison import HINTS, add_dtypes_and_checks, check_memory, dtype_of, report

PROG = "sharded-embedding-tool"
NORM_TOLERANCE: Final = 0.05


class LossAndGradient(NamedTuple):
    loss: Any
    gradient: Any


class Inputs(NamedTuple):
    """table: (vocabulary, features); tokens and targets: (sequence,) int32."""

    table: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray


def command() -> NoReturn:
    """Run the tool as the process's own command."""
    cli.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with these arguments, or with the command line's, and return the exit code."""
    parser = _parser()
    args = parser.parse(argv)
    table, logits = args.vocab_size * args.feature_size, args.sequence_length * args.vocab_size
    try:
        # the table is drawn in float64 and scaled; logits and their gradient are float32
        check_memory(
            16 * table + 8 * logits,
            f"--vocab-size {args.vocab_size}, --feature-size {args.feature_size} and --sequence-length "
            f"{args.sequence_length}",
        )
        from ipu_jax import configure  # imports jax

        configure(args.ipus)
        inputs = random_inputs(args.vocab_size, args.feature_size, args.sequence_length, args.seed, dtype_of(args))
    except (ValueError, MemoryError) as error:
        parser.refuse(error)
    return report(args, run_pipeline(args.ipus, inputs), lambda: run_dense(inputs), of_norm=NORM_TOLERANCE)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        PROG,
        "Compares a tied embedding, its projection and softmax cross-entropy, sharded over IPUs, with the "
        "unsharded program.",
        called={"num_ipus": "--ipus"},
        hints=HINTS,
    )
    parser.add_ipus(4, "IPUs to split the table over")
    parser.add_size("--vocab-size", 8000, "rows of the table")
    parser.add_size("--feature-size", 768, "columns of the table")
    parser.add_size("--sequence-length", 256, "tokens")
    parser.add_size("--seed", 42, "seed of the random inputs", least=0)
    add_dtypes_and_checks(parser, "the table")
    return parser


def random_inputs(vocabulary: int, features: int, length: int, seed: int, dtype: str) -> Inputs:
    """Return a table of standard deviation 1/sqrt(features), like initial embeddings, and random tokens and targets."""
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    table = (rng.standard_normal((vocabulary, features)) / np.sqrt(features)).astype(jnp.dtype(dtype))
    tokens, targets = rng.integers(0, vocabulary, (2, length), dtype=np.int32)
    return Inputs(table, tokens, targets)


def run_pipeline(ipus: int, inputs: Inputs) -> LossAndGradient:
    """Return the loss and the gradient of the whole table from a pipeline of three stages on all IPUs, as arrays."""
    from jax.sharding import PartitionSpec

    from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
    from ipu_jax.pipelines import IPU_AXIS
    from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection

    vocabulary = len(inputs.table)

    def embed(table, x, batch):
        return embedding(table, batch["tokens"], size=vocabulary)

    def project(table, x, batch):
        return tied_projection(x, table, size=vocabulary)

    def cross_entropy(params, logits, batch):
        return log_softmax_cross_entropy(logits, batch["targets"], size=vocabulary).mean()

    stages = [
        Stage(embed, params="table", ipu=ALL_IPUS, name="embedding"),
        Stage(project, params="table", ipu=ALL_IPUS, name="projection"),
        Stage(cross_entropy, ipu=ALL_IPUS, name="cross-entropy"),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), specs={"table": PartitionSpec(IPU_AXIS, None)})
    params = pipeline.shard({"table": inputs.table})
    batch = {"tokens": inputs.tokens[None], "targets": inputs.targets[None]}
    loss, gradients = pipeline.value_and_grad(params, batch)
    return LossAndGradient(np.asarray(loss), np.asarray(pipeline.unshard(gradients)["table"]))


def run_dense(inputs: Inputs) -> LossAndGradient:
    """Return the same results from one device, without `ipu_jax` and `sharded_ops`."""
    import jax
    import jax.numpy as jnp
    import optax

    def loss(table):
        logits = table[inputs.tokens] @ table.T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), inputs.targets).mean()

    return LossAndGradient(*jax.device_get(jax.jit(jax.value_and_grad(loss))(inputs.table)))


if __name__ == "__main__":
    command()
