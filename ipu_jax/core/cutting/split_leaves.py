"""Find the weights that lie split over the IPUs: all that read them are operations on all IPUs that split them alike.

    table ---> cast ---> pad ---> everywhere, dim 0            each IPU holds its rows of the table, and
      '------> transpose -------> everywhere, dim 1            casts and transposes these alone

Between such a leaf and the operations, only what each IPU can do on its own shard may be done to it. A leaf that
anything else reads is whole on every IPU, and each takes its shard of it.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Value, Var
from ipu_jax.base.jaxprs import variables
from ipu_jax.base.row_rules import Taken
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.everywhere import is_everywhere, shard_size
from ipu_jax.core.layout.tree_parts import Part, resized
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.programs.cost import bytes_of

_KEEP: Final = ("convert_element_type", "copy", "div", "mul", "neg", "reduce_precision", "stop_gradient")
"""Operations, on a shard alone or with a scalar, that make zeros of zeros: padding stays padding."""


class Blocked(NamedTuple):
    """A part that is needed whole, and the equation that needs it; None if the part is a result of the function."""

    part: Part
    by: Eqn | None


@dataclasses.dataclass(frozen=True)
class OverIpus:
    """Hold the parts of weights that lie split over the IPUs.

    Attributes:
        ipus: the number of IPUs.
        dims: per part, the dim along which it is split.
        blocked: other parts that operations on all IPUs split, and what needs each whole.
    """

    ipus: int
    dims: Mapping[Part, int] = dataclasses.field(default_factory=dict)
    blocked: Mapping[Part, Blocked] = dataclasses.field(default_factory=dict)

    def dim_of(self, part: Part) -> int | None:
        """Return the dim along which a part, or one that holds it, is split."""
        return next((dim for held, dim in self.dims.items() if held.holds(part)), None)

    def shards(self, division: Division, s: int) -> dict[Var, int] | Blocked:
        """Return the values of a stage that are shards, each with its dim; or a split part that it needs whole."""
        piece, found = division.pieces[s], dict[Var, int]()
        for v in piece.weights:
            dim = self.dim_of(division.parts[v])
            of_one = {} if dim is None else _shards_of(division, s, v, dim, self.ipus)
            if isinstance(of_one, Blocked):
                return of_one
            found |= of_one
        return found


def over_ipus(division: Division, placement: Sequence[int | None], ipus: int) -> OverIpus:
    """Find the weights that lie split: concurrent stages alone read them, and all of these split them alike.

    Args:
        division: the divided function.
        placement: per stage its IPU, or None if it is concurrent.
        ipus: the number of IPUs.
    """
    dims, blocked = dict[Part, int](), dict[Part, Blocked]()
    readers: dict[Part, list[tuple[int, Var]]] = {}
    for s, piece in enumerate(division.pieces if ipus > 1 and None in placement else ()):
        for v in piece.weights:
            readers.setdefault(division.parts[v], []).append((s, v))
    for part, of_part in readers.items():
        for dim in _dims_wanted(division, of_part, ipus):
            found = [_shards_of(division, s, v, dim, ipus) for s, v in of_part]
            prevents = next((of_stage for of_stage in found if isinstance(of_stage, Blocked)), None)
            if prevents is None:
                dims[part] = dim
                break
            blocked.setdefault(part, prevents)
    return OverIpus(ipus, dims, {part: why for part, why in blocked.items() if part not in dims})


def _dims_wanted(division: Division, readers: Sequence[tuple[int, Var]], ipus: int) -> list[int]:
    """Return the dims along which operations on all IPUs split a leaf, also after casts and transposes of it."""
    found = set[int]()
    for s, v in readers:
        for dim in range(v.aval.ndim):
            shards = {v: dim}
            for eqn in division.pieces[s].equations:
                for x, of in zip(eqn.invars, eqn.params["split_dims"], strict=True) if is_everywhere(eqn) else ():
                    found |= {dim} if not isinstance(x, core.Literal) and shards.get(x, -1) == of else set()
                for x in () if is_everywhere(eqn) else [x for x in variables(eqn.invars) if x in shards]:
                    after = _dim_after(eqn, x, shards[x], ipus)
                    shards |= {} if after is None else {eqn.outvars[0]: after}
    return sorted(found)


def _shards_of(division: Division, s: int, leaf: Var, dim: int, ipus: int) -> dict[Var, int] | Blocked:
    """Return the values of a stage that are shards if a leaf is a shard, each with its dim; or what needs it whole."""
    found = {leaf: dim}
    for eqn in division.pieces[s].equations:
        for v in (v for v in variables(eqn.invars) if v in found):
            if is_everywhere(eqn):
                if any(x is v and of != found[v] for x, of in zip(eqn.invars, eqn.params["split_dims"], strict=True)):
                    return Blocked(division.parts[leaf], eqn)
                continue
            after = _dim_after(eqn, v, found[v], ipus)
            if after is None:
                return Blocked(division.parts[leaf], eqn)
            found[eqn.outvars[0]] = after
    return Blocked(division.parts[leaf], None) if found.keys() & {*variables(division.trace.results)} else found


def _dim_after(eqn: Eqn, v: Var, dim: int, ipus: int) -> int | None:
    """Return the dim of an equation's result along which it is split, or None if the IPUs cannot compute it alone."""
    name, params, shape = eqn.primitive.name, eqn.params, v.aval.shape
    if name in _KEEP and all(x is v or x.aval.shape == () for x in eqn.invars):
        return None if name == "div" and eqn.invars[0] is not v else dim
    if name == "transpose":
        return params["permutation"].index(dim)
    if name == "pad":
        padding = [(0, 0, 0)] * len(shape)
        padding[dim] = (0, shard_size(shape[dim], ipus) * ipus - shape[dim], 0)
        value = eqn.invars[1]
        is_zero = isinstance(value, core.Literal) and value.val == 0
        return dim if is_zero and [*map(tuple, params["padding_config"])] == padding else None
    if name == "slice":
        is_kept = (params["start_indices"][dim], params["limit_indices"][dim]) == (0, shape[dim])
        return dim if is_kept and params["strides"] is None else None
    if name in ("squeeze", "reshape", "broadcast_in_dim"):
        return _dim_among_ones(shape, eqn.outvars[0].aval.shape, dim)
    return None


def _dim_among_ones(shape: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return where a dim is after dims of size 1 were taken out or put in; None if more was changed."""
    kept, kept_after = ([d for d, size in enumerate(of) if size != 1] for of in (shape, after))
    alike = [shape[d] for d in kept] == [after[d] for d in kept_after]
    return kept_after[kept.index(dim)] if alike and dim in kept else None


def on_shards(equations: Sequence[Eqn], shards: Mapping[Var, int], ipus: int) -> list[Eqn]:
    """Return a stage's equations for shards in place of whole values, which are padded already."""
    found: list[Eqn] = []
    padded: dict[Var, Var] = {}
    for eqn in equations:
        name, params = eqn.primitive.name, dict(eqn.params)
        invars = [v if isinstance(v, core.Literal) else padded.get(v, v) for v in eqn.invars]
        if is_everywhere(eqn):
            params["split_dims"] = tuple(
                None if not isinstance(v, core.Literal) and v in shards else dim
                for v, dim in zip(eqn.invars, params["split_dims"], strict=True)
            )
        elif eqn.outvars and eqn.outvars[0] in shards:
            dim = shards[eqn.outvars[0]]
            local = shard_size(eqn.outvars[0].aval.shape[dim], ipus)
            if name == "pad":
                padded[eqn.outvars[0]] = invars[0]
                continue
            of_size = {"slice": "limit_indices", "reshape": "new_sizes", "broadcast_in_dim": "shape"}.get(name)
            if of_size is not None:
                params[of_size] = (*params[of_size][:dim], local, *params[of_size][dim + 1 :])
        found.append(eqn.replace(invars=invars, params=params))
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def trained_but_for_padding(shard: Value, dim: int, size: int) -> Value:
    """Return this IPU's shard of a leaf, whose rows of padding get no gradient, so that they stay zeros.

    Args:
        shard: rows of the leaf along `dim`.
        dim: the dim.
        size: the rows of the leaf on all IPUs, without padding.
    """
    return shard


def _gradient(dim: int, size: int, _: None, dy: Value) -> tuple[Value]:
    local = dy.shape[dim]
    row = lax.axis_index(IPU_AXIS) * local + lax.broadcasted_iota(jnp.int32, dy.shape, dim)
    return (jnp.where(row < size, dy, jnp.zeros((), dy.dtype)),)


trained_but_for_padding.defvjp(lambda shard, dim, size: (shard, None), _gradient)


def bytes_of_part(leaf: Var, part: Part, over: OverIpus | None = None) -> int:
    """Return the bytes of a part, or of one IPU's shard of it."""
    shape = leaf.aval.shape if part.rows is None else Taken(part.axis, *part.rows).of(leaf.aval.shape)
    dim = None if over is None else over.dims.get(part)
    if over is not None and dim is not None:
        shape = resized(shape, dim, shard_size(shape[dim], over.ipus))
    return bytes_of([leaf.aval.update(shape=shape)])
