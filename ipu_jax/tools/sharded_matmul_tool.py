"""sharded-matmul-tool: compare the sharded matmul with the unsharded program, on inputs of any size.

    logits = lhs @ rhs          lhs (rows, cols) on every IPU, rhs (cols, outsize) with its columns split over the IPUs
    loss   = mean softmax cross-entropy of the logits with random labels

It computes logits, loss, dLhs and dRhs twice, by `sharded_ops` on virtual IPUs and by plain jax and optax on one
device, and reports whether they agree. Its exit code is 0 if they do, 1 if they don't, and 2 if the arguments are
impossible.

    $ sharded-matmul-tool --ipus 4
    Loss on 4 IPUs: 9.0730
    Loss unsharded: 9.0730
    Results match.

The tolerances are those of numpy.allclose. The gradients of a mean over many rows are small, and an error of 0.01
passes in the half types: these test only the logits and the loss, and float32 tests all four.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ipu_jax import IPU_AXIS, configure, make_mesh
from ipu_jax.tools._command_line import FLOAT32_TOLERANCE, HALF_TOLERANCE, Parser, Tolerance
from sharded_ops import Split, log_softmax_cross_entropy, matmul


class Results(NamedTuple):
    logits: Any
    loss: Any
    dLhs: Any
    dRhs: Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with these arguments, or those of the command line, and return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        configure(args.ipus)
        mesh = make_mesh(1, args.ipus)
        dtype = jnp.float16 if args.fp16 else jnp.bfloat16 if args.bf16 else jnp.float32
        lhs, rhs, labels = random_inputs(args.rows, args.cols, args.outsize, args.seed, dtype)
    except (ValueError, MemoryError) as error:
        parser.error(str(error))

    sharded = jax.device_get(sharded_program(mesh, args.outsize)(lhs, rhs, labels))
    print(f"Loss on {args.ipus} IPU{'s' if args.ipus > 1 else ''}: {sharded.loss:.4f}")
    if not args.checks:
        return 0

    dense = jax.device_get(jax.jit(dense_program)(lhs, rhs, labels))
    print(f"Loss unsharded: {dense.loss:.4f}")
    differing = differences(sharded, dense, FLOAT32_TOLERANCE if dtype == jnp.float32 else HALF_TOLERANCE)
    for name, error in differing.items():
        print(f"Max ABS error: {error:.3g} ({name})")
    if differing:
        return 1
    print("Results match.")
    return 0


def random_inputs(rows: int, cols: int, outsize: int, seed: int, dtype: Any) -> tuple[np.ndarray, ...]:
    """Return lhs like the activations of a tanh, rhs as a dense layer is initialised, and a random label per row.

    So the logits have a standard deviation of 1/3, whatever the sizes, and practically none reaches 2, where
    neighbouring bfloat16 numbers are further apart than the tolerance of the half types.
    """
    rng = np.random.default_rng(seed)
    lhs = rng.uniform(-1, 1, (rows, cols)).astype(dtype)
    rhs = rng.uniform(-1 / np.sqrt(cols), 1 / np.sqrt(cols), (cols, outsize)).astype(dtype)
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


def _parser() -> Parser:
    parser = Parser(
        prog="sharded-matmul-tool",
        description="Compares a matmul and its softmax cross-entropy, sharded over IPUs, with the unsharded program.",
    )

    parser.add_size("--rows", 256, "rows of lhs, the tokens")
    parser.add_size("--cols", 768, "columns of lhs, and rows of rhs")
    parser.add_size("--outsize", 8000, "columns of rhs, which are split over the IPUs")
    parser.add_size("--ipus", 2, "IPUs to split them over")
    parser.add_size("--seed", 42, "seed of the random inputs", least=0)
    parser.add_dtypes_and_checks("lhs and rhs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
