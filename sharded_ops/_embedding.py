"""Look up entries of a dim that is split over the IPUs of a mesh axis: rows of a table, or entries of the last dim.

Each IPU looks up the entries that its shard contains, and takes zero for all others. Then either one all-reduce adds up
the results, or one reduce-scatter adds them up and leaves each IPU the results of its own tokens. As all addends except
one are zero, the sum is exact in any dtype. The gradient on each IPU is a scatter into its own shard, without
communication.

    ids             0  4  9                         table rows     IPU 0: 0 1 2 3 4     IPU 1: 5 6 7 8 9
    IPU 0 finds     a  b  0
    IPU 1 finds     0  0  c
    sum, on all     a  b  c

A table can be split by features instead: every IPU looks up its own columns of every row, and sends nothing.

An index that is in no shard (negative, or not below `size`) gives zero on all IPUs and no gradient. Padding is never
read: an index outside the shard is replaced by one out of bounds.

The gradient of a table in a half type is summed in float32 and rounded once, however often an id occurs.

Dims: V rows of the table, D features; n IPUs.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sharded_ops._arguments import array, array_like, one_of
from sharded_ops._collectives import check_same_on_all, reduce_scatter_tokens, reduce_to_all
from sharded_ops._split import as_int32, check_one_per_row, check_shard, local_rows, mask_padding, split_over


def embedding(
    table: jax.Array,
    ids: ArrayLike,
    *,
    size: int,
    axis: str = "ipu",
    split: Literal["rows", "features"] = "rows",
    reduction: Literal["sum", "scatter"] = "sum",
) -> jax.Array:
    """Look up rows of a table that is split over the IPUs of `axis`, by rows or by features.

    split="rows": `table` is (V, D) globally; each IPU holds (V/n, D). The result is (ids.., D) on all IPUs. Forward:
    one all-reduce of the result. Backward: under check_vma=True nothing; under check_vma=False one all-reduce of its
    cotangent.

    split="rows", reduction="scatter": the result is split over the tokens, as `scatter_tokens` would split it. The ids
    are (N, ..) on all IPUs, the result is (N, .., D) globally, and each IPU holds (ceil(N/n), .., D), with zeros for
    padding. Forward: one reduce-scatter of (N, .., D). Backward: one all-gather of the cotangent.

    split="features": `table` is (V, D) globally; each IPU holds (V, D/n). The result stays split like the table: it is
    (ids.., D) globally, and each IPU holds (ids.., D/n), which `matmul(split="rows")` takes and `from_all` gathers.
    Forward and backward: sends nothing.

    Args:
        table: of any dtype, in the shape given above. If n does not divide the split dim, pad it first:
            `Split(size, n).pad(table, 0)` for rows, `Split(size, n).pad(table, 1)` for features.
        ids: any shape and integer dtype, the same on all IPUs. An id outside [0, V), which includes negative ids, gives
            a row of zeros and no gradient.
        size: the size of the split dim without padding: V, or D under split="features". Padding is never read, and its
            gradient is zero; the result's columns for padded features are zeros.
        axis: the mesh axis.
        split: which dim of `table` is split.
        reduction: what split="rows" does with the results of the IPUs: "sum" leaves the sum on all IPUs, "scatter"
            leaves it split over dim 0 of `ids`.

    Returns:
        The rows in the dtype of `table`, in the shape given above.

    Raises:
        ValueError: `ids` are not integers, differ between IPUs or have no dim to scatter; `table` does not have 2 dims
            or its shard does not fit `size`; `split` or `reduction` is unknown, or the two are incompatible; or the
            enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> table_VD = jnp.array([[0.0], [10.0], [20.0], [30.0]])
        >>> op = partial(embedding, size=4)
        >>> lookup = jax.shard_map(op, mesh=mesh, in_specs=(P("ipu", None), P()), out_specs=P())
        >>> print(jax.jit(lookup)(table_VD, jnp.array([3, 1, -1])).ravel())
        [30. 10.  0.]
    """
    one_of("split", split, ("rows", "features"), "is not a way to split a table")
    one_of("reduction", reduction, ("sum", "scatter"), "is not a way to leave the result")
    if reduction == "scatter" and split == "features":
        raise ValueError(
            "reduction='scatter' leaves a sum over the IPUs scattered over tokens, but split='features' sums nothing: "
            "use split='rows', or from_all and then scatter_tokens"
        )
    rows_or_features = split_over(size, axis)
    table, ids = array("table", table), array_like("ids", ids)
    if table.ndim != 2:
        raise ValueError(f"table has shape {table.shape} on each IPU, but must have 2 dims: reshape it to (rows, D)")
    check_shard("table", table, 0 if split == "rows" else 1, rows_or_features, axis)
    check_same_on_all("ids", ids, axis)
    if split == "features":
        rows = as_int32("ids", ids, table.shape[0])
        # jax counts a negative index from the end, so it is replaced by the first out-of-bounds index.
        rows = jnp.where(rows < 0, table.shape[0], rows)
        return mask_padding(_looked_up(table, rows), -1, rows_or_features, axis, fill=0)
    if reduction == "scatter" and np.ndim(ids) == 0:
        raise ValueError("ids has shape (), without a dim 0 to scatter: give reduction='sum', or an array of ids")
    result = _looked_up(table, local_rows(as_int32("ids", ids, rows_or_features.size), rows_or_features, axis))
    return reduce_to_all(result, axis) if reduction == "sum" else reduce_scatter_tokens(result, axis)


def take_along_last_dim(x_shard: jax.Array, indices: ArrayLike, *, size: int, axis: str = "ipu") -> jax.Array:
    """Pick one entry from each row of a last dim that is split over the IPUs of `axis`.

    This is the sharded form of `jnp.take_along_axis(x, indices[..., None], axis=-1)[..., 0]`.

    Forward: one all-reduce of the result, (N..). Backward: under check_vma=True nothing; under check_vma=False one
    all-reduce of its cotangent.

    Args:
        x_shard: (N.., V) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(V/n)).
        indices: (N..) of any integer dtype, the same on all IPUs. An index outside [0, size), which includes negative
            indices, gives zero and no gradient.
        size: V, without padding. Padding is never read, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        (N..) in the dtype of `x_shard`, the same on all IPUs.

    Raises:
        ValueError: `indices` are not integers, differ between IPUs or don't have the shape (N..), the shard does not
            fit `size`, or the enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x_NV = jnp.arange(8.0).reshape(2, 4)
        >>> op = partial(take_along_last_dim, size=4)
        >>> pick = jax.shard_map(op, mesh=mesh, in_specs=(P(None, "ipu"), P()), out_specs=P())
        >>> print(jax.jit(pick)(x_NV, jnp.array([3, 0])))
        [3. 4.]
    """
    split = split_over(size, axis)
    x_shard = array("x_shard", x_shard)
    check_shard("x_shard", x_shard, -1, split, axis)
    check_one_per_row("indices", indices, x_shard)
    check_same_on_all("indices", indices, axis)
    columns = local_rows(as_int32("indices", indices, split.size), split, axis)
    picked = jnp.take_along_axis(x_shard, columns[..., None], axis=-1, mode="fill", fill_value=0)
    return reduce_to_all(picked[..., 0], axis)


def _looked_up(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Return these rows of the table, with zeros for row indices that are out of bounds."""
    if jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize <= 2:
        return _looked_up_half(table, rows)
    return table.at[rows].get(mode="fill", fill_value=0)


# A custom rule, because lax's rule would add up the cotangents of a row's tokens in the half type: in bfloat16, 256 + 1
# is 256. The transpose of this rule widens them first. In forward mode, a copy of the table's tangent is widened.
@jax.custom_jvp
def _looked_up_half(table: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[rows].get(mode="fill", fill_value=0)


@_looked_up_half.defjvp
def _looked_up_half_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    table, rows = primals
    dresult = tangents[0].astype(jnp.float32).at[rows].get(mode="fill", fill_value=0)
    return _looked_up_half(table, rows), dresult.astype(table.dtype)
