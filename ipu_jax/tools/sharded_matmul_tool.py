"""sharded-matmul-tool: compare the sharded matmul with the unsharded program, on inputs of any size.

    logits = lhs @ rhs          lhs (rows, cols) on every IPU, rhs (cols, outsize) with its columns split over the IPUs
    loss   = mean softmax cross-entropy of the logits with random labels

It computes logits, loss, dLhs and dRhs twice, with `sharded_ops` on virtual IPUs and with plain jax and optax on one
device, and reports whether they agree. Its exit code is 0 if they do, 1 if they don't, and 2 if the arguments are
impossible. Arguments are checked before jax is imported.

    $ sharded-matmul-tool --ipus 4
    Loss on 4 IPUs: 9.0730
    Loss unsharded: 9.0730
    Results match.

The gradients of a mean over many rows are small, so an error of 0.01 passes in the half types. In effect, the half
types test only the logits and the loss, and float32 tests all four.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ipu_jax import cli
from ipu_jax.tools.comparison import HINTS, add_dtypes_and_checks, check_memory, dtype_of, report

PROG = "sharded-matmul-tool"


class Results(NamedTuple):
    logits: Any
    loss: Any
    dLhs: Any
    dRhs: Any


def command() -> NoReturn:
    """Run the tool as the process's own command."""
    cli.run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with these arguments, or with the command line's, and return the exit code."""
    parser = _parser()
    args = parser.parse(argv)
    rows, cols, outsize = args.rows, args.cols, args.outsize
    try:
        # lhs and rhs are drawn in float64; logits and their gradient are float32
        check_memory(
            8 * (rows * cols + cols * outsize) + 8 * rows * outsize,
            f"--rows {rows}, --cols {cols} and --outsize {outsize}",
        )
        from ipu_jax import configure  # imports jax

        configure(args.ipus)
        inputs = random_inputs(rows, cols, outsize, args.seed, dtype_of(args))
    except (ValueError, MemoryError) as error:
        parser.refuse(error)
    return report(args, run_sharded(args.ipus, inputs), lambda: run_dense(inputs))


def _parser() -> cli.Parser:
    parser = cli.Parser(
        PROG,
        "Compares a matmul and its softmax cross-entropy, sharded over IPUs, with the unsharded program.",
        called={"num_ipus": "--ipus", "m": "--rows", "k": "--cols", "n": "--outsize"},
        hints=HINTS,
    )
    parser.add_size("--rows", 256, "rows of lhs, the tokens")
    parser.add_size("--cols", 768, "columns of lhs, and rows of rhs")
    parser.add_size("--outsize", 8000, "columns of rhs, which are split over the IPUs")
    parser.add_ipus(2, "IPUs to split them over")
    parser.add_size("--seed", 42, "seed of the random inputs", least=0)
    add_dtypes_and_checks(parser, "lhs and rhs")
    return parser


def random_inputs(rows: int, cols: int, outsize: int, seed: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Return lhs like tanh activations, rhs like the initial weights of a dense layer, and a random label per row.

    So the logits have a standard deviation of 1/3 for all sizes. Practically none reaches 2, where neighbouring
    bfloat16 numbers are further apart than the tolerance of the half types.
    """
    import jax.numpy as jnp

    rng = np.random.default_rng(seed)
    lhs = rng.uniform(-1, 1, (rows, cols)).astype(jnp.dtype(dtype))
    rhs = rng.uniform(-1 / np.sqrt(cols), 1 / np.sqrt(cols), (cols, outsize)).astype(jnp.dtype(dtype))
    return lhs, rhs, rng.integers(0, outsize, rows, dtype=np.int32)


def run_sharded(ipus: int, inputs: tuple[np.ndarray, ...]) -> Results:
    """Return the results with the columns of rhs split over the IPUs, as numpy arrays."""
    import jax
    from jax.sharding import PartitionSpec as P

    from ipu_jax import make_mesh
    from ipu_jax.pipelines import IPU_AXIS
    from sharded_ops import Split, log_softmax_cross_entropy, matmul

    _, rhs, labels = inputs
    outsize = rhs.shape[1]
    split = Split(outsize, ipus)
    columns = split.spec(1, 2, IPU_AXIS)

    def each_ipu(lhs, rhs_shard, labels):
        logits_shard = matmul(lhs, rhs_shard, split="columns", size=outsize, axis=IPU_AXIS)
        return log_softmax_cross_entropy(logits_shard, labels, size=outsize, axis=IPU_AXIS).mean(), logits_shard

    on_ipus = jax.shard_map(each_ipu, mesh=make_mesh(1, ipus), in_specs=(P(), columns, P()), out_specs=(P(), columns))

    def loss_and_logits(lhs, rhs):
        loss, logits = on_ipus(lhs, split.pad(rhs, 1), labels)
        return loss, split.unpad(logits, 1)

    return _results(loss_and_logits, inputs)


def run_dense(inputs: tuple[np.ndarray, ...]) -> Results:
    """Return the same results from one device, without `sharded_ops`."""
    import jax.numpy as jnp
    import optax

    def loss_and_logits(lhs, rhs):
        logits = lhs @ rhs
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), inputs[2])
        return losses.mean(), logits

    return _results(loss_and_logits, inputs)


def _results(loss_and_logits: Callable[..., Any], inputs: tuple[np.ndarray, ...]) -> Results:
    import jax

    lhs, rhs, _ = inputs
    (loss, logits), (dLhs, dRhs) = jax.jit(jax.value_and_grad(loss_and_logits, (0, 1), has_aux=True))(lhs, rhs)
    return jax.device_get(Results(logits, loss, dLhs, dRhs))


if __name__ == "__main__":
    command()
