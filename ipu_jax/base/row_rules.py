"""Follow rows, the layers of a stacked leaf, through operations: rows of a result are computed from rows of the inputs.

w.astype(half)[3]      from      w[3]              elementwise: the same rows
w.swapaxes(0, 1)[3]    from      w[:, 3]           along another dim
(w @ w.mT)[3]          from      w[3], w[3]        a product for each layer

Each rule knows one kind of primitive. A primitive without a rule mixes rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ipu_jax.base.annotations import Eqn
from ipu_jax.base.jaxprs import ELEMENTWISE


class Taken(NamedTuple):
    """Rows of a value, from `start` up to `stop` along a dim."""

    dim: int
    start: int
    stop: int

    def at(self, dim: int) -> "Taken":
        """Return the same rows along another dim."""
        return self._replace(dim=dim)

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with the number of these rows."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])


class Before(NamedTuple):
    """Describe the inputs from which rows of a result are computed.

    Attributes:
        rows: per input, its rows that are needed; None: all of it.
        params: parameters of the equation, where they are others for these rows.
        within: the rows of what is computed then; None: it is the rows.
    """

    rows: list[Taken | None]
    params: dict[str, Any] = {}  # noqa: RUF012, a default of a named tuple
    within: Taken | None = None


Rule = Callable[[Eqn, Taken], Before | None]
"""Return what rows of an equation's result are computed from; None if they depend on other rows, too."""


def _elementwise(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows of all inputs, and all of an input that has one row, or is a number."""
    count, rank = eqn.outvars[0].aval.shape[taken.dim], eqn.outvars[0].aval.ndim
    shapes = [v.aval.shape for v in eqn.invars]
    if any(shape and len(shape) != rank for shape in shapes):
        return None
    return Before([taken if shape and shape[taken.dim] == count else None for shape in shapes])


def _transpose(eqn: Eqn, taken: Taken) -> Before:
    """Take the same rows, along the dim that becomes this one."""
    return Before([taken.at(eqn.params["permutation"][taken.dim])])


def _broadcast(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows, or all of an input without this dim."""
    to, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    own = to.index(taken.dim) if taken.dim in to else None
    has_rows = own is not None and eqn.invars[0].aval.shape[own] == shape[taken.dim]
    return Before([taken.at(own) if own is not None and has_rows else None], {"shape": taken.of(shape)})


def _reshape(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the rows with the same numbers, such as pairs of layers."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    outer, size = math.prod(new[: taken.dim]), math.prod(new[taken.dim + 1 :])
    own = [d for d, count in enumerate(old) if count > 1 and math.prod(old[:d]) == outer]
    if eqn.params["dimensions"] is not None or not own or 0 in old:
        return None
    of_row = math.prod(old[own[0] + 1 :])
    rows = Taken(own[0], taken.start * size // of_row, -(-taken.stop * size // of_row))
    more, left = divmod((rows.stop - rows.start) * of_row, size)
    if left or rows.start * of_row % size:
        return None
    first = taken.start - rows.start * of_row // size
    within = Taken(taken.dim, first, first + taken.stop - taken.start)
    return Before([rows], {"new_sizes": (*new[: taken.dim], more, *new[taken.dim + 1 :])}, within)


def _without_dims(eqn: Eqn, taken: Taken) -> Before:
    """Take the same rows, if other dims are reduced or left out."""
    gone = eqn.params["dimensions" if eqn.primitive.name == "squeeze" else "axes"]
    kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in gone]
    return Before([taken.at(kept[taken.dim])])


def _along_another(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows, if the operation is along another dim."""
    params = eqn.params
    along = next(params[name] for name in ("axis", "dimension") if name in params)
    return None if along == taken.dim else Before([taken for _ in eqn.invars])


def _reversed(eqn: Eqn, taken: Taken) -> Before:
    """Take rows counted from the end."""
    if taken.dim not in eqn.params["dimensions"]:
        return Before([taken])
    count = eqn.invars[0].aval.shape[taken.dim]
    return Before([Taken(taken.dim, count - taken.stop, count - taken.start)])


def _slice(eqn: Eqn, taken: Taken) -> Before | None:
    """Take rows counted from the first row of the slice."""
    starts, stops = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    step = (eqn.params["strides"] or [1] * len(starts))[taken.dim]
    first, last = (starts[taken.dim] + row * step for row in (taken.start, taken.stop - 1))
    if step != 1 and taken.stop - taken.start > 1:
        return None
    starts[taken.dim], stops[taken.dim] = 0, last + 1 - first
    params = {"start_indices": tuple(starts), "limit_indices": tuple(stops)}
    return Before([Taken(taken.dim, first, last + 1)], params)


def _pad(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows, if another dim is padded."""
    return Before([taken, None]) if eqn.params["padding_config"][taken.dim] == (0, 0, 0) else None


def _dynamic_slice(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows, if the slice is along another dim."""
    sizes, operand = eqn.params["slice_sizes"], eqn.invars[0].aval
    if sizes[taken.dim] != operand.shape[taken.dim]:
        return None
    return Before([taken, *[None] * (len(eqn.invars) - 1)], {"slice_sizes": taken.of(sizes)})


def _product(eqn: Eqn, taken: Taken) -> Before:
    """Take the same rows of both operands, or of the only operand with this dim."""
    contracted, batch = eqn.params["dimension_numbers"]
    dims = [[d for d in range(v.aval.ndim) if d not in (*contracted[k], *batch[k])] for k, v in enumerate(eqn.invars)]
    at, left = taken.dim - len(batch[0]), len(dims[0])
    if at < 0:
        return Before([taken.at(of_batch[taken.dim]) for of_batch in batch])
    return Before([taken.at(dims[0][at]), None] if at < left else [None, taken.at(dims[1][at - left])])


_REDUCTIONS: Final = (
    *("squeeze", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("argmax", "argmin"),
)
_CUMULATIVE: Final = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "concatenate")
FOLLOWED: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(sorted({*ELEMENTWISE, "name", "optimization_barrier"}), _elementwise),
    **dict.fromkeys(_REDUCTIONS, _without_dims),
    **dict.fromkeys(_CUMULATIVE, _along_another),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "rev": _reversed,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dot_general": _product,
}
"""Per primitive, how rows of its result follow from rows of its inputs. Elsewhere all of an input is read."""


def rows_before(eqn: Eqn, taken: Taken, rules: Mapping[str, Rule]) -> Before | None:
    """Return what rows of an equation's result are computed from; None if they depend on other rows, too."""
    if not hasattr(eqn, "primitive") or len(eqn.outvars) != 1 or eqn.effects:
        return None
    rule = rules.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, taken)
