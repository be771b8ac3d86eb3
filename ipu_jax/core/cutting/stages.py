"""Make the stages of a divided function: each with its equations, and with the weights that it reads.

stage 0     params "stage 0": embed's positions, layers 0-3      shared "shared 0": the embedding
stage 1     params "stage 1": layers 4-7
stage 2     params "stage 2": layers 8-9, the last norm          shared "shared 0": the embedding, transposed
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Batch, Eqn, Key, Params, Tree, Value, Var
from ipu_jax.base.jaxprs import in_scan_parts, part_of
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.rows import equations
from ipu_jax.core.cutting.split_leaves import Blocked, OverIpus, on_shards, over_ipus, trained_but_for_padding
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.tree_parts import Part, leaves_at
from ipu_jax.core.mesh.devices import ALL_IPUS
from ipu_jax.core.stage import Outputs, Stage


@dataclasses.dataclass
class Held:
    """Who holds the weights and the state.

    Attributes:
        groups: per group of weights its parts.
        own, shared: per stage the names of its own group and of the shared ones that it reads.
        state: per stage the parts of the state that it holds, in its group "stage 0", "stage 1" and so on.
        copied: the parts that every IPU holds a copy of, in shared groups, and the stages that read them.
        over: the parts that lie split over the IPUs.
    """

    groups: Mapping[str, list[Part]]
    own: list[str | None]
    shared: list[tuple[str, ...]]
    state: list[list[Part]]
    copied: dict[Part, list[int]]
    over: OverIpus

    def layout(self, params: Params) -> PackedLayout:
        """Return which group holds which part of the user's tree of weights."""
        return PackedLayout.of("params", params, self.groups, self.over.dims)

    def state_layout(self, state: Tree) -> PackedLayout:
        """Return which group holds which part of the user's tree of the state."""
        return PackedLayout.of("state", state, {f"stage {s}": parts for s, parts in enumerate(self.state) if parts})


_ALL: Final = "all IPUs"
"""The group of what only concurrent stages read."""


def who_holds(division: Division, placement: Sequence[int | None], ipus: int) -> Held:
    """Give each part to the group of its stage; stages of one IPU that share one get one group.

    Args:
        division: the divided function.
        placement: per stage its IPU, or None if it is concurrent.
        ipus: the number of IPUs.
    """
    users: dict[Part, list[int]] = {}
    for s, piece in enumerate(division.pieces):
        for var in piece.weights:
            users.setdefault(division.parts[var], []).append(s)
    copied = {part: stages for part, stages in users.items() if len({placement[s] for s in stages}) > 1}
    lead = list(range(len(placement)))  # per stage, the stage whose group it shares
    for part, stages in users.items():
        if part not in copied and placement[stages[0]] is not None:
            first = min(lead[s] for s in stages)
            old = {lead[s] for s in stages}
            lead = [first if at in old else at for at in lead]
    groups: dict[str, Any] = {}
    for part, stages in users.items():
        own = _ALL if placement[stages[0]] is None else f"stage {lead[stages[0]]}"
        groups.setdefault(_shared_name(part) if part in copied else own, []).append(part)
    used = {part.leaf for part in users}
    for k in range(len(division.trace.params)):
        if k not in used:  # nothing reads it
            groups.setdefault(_ALL if placement[0] is None else "stage 0", []).append(Part(k))
    named = [_ALL if ipu is None else f"stage {at}" for ipu, at in zip(placement, lead, strict=True)]
    own = [name if name in groups else None for name in named]
    of_pieces = [[division.parts[var] for var in piece.weights] for piece in division.pieces]
    shared = [tuple(dict.fromkeys(_shared_name(p) for p in parts if p in copied)) for parts in of_pieces]
    state = [[value.part for value in division.state_of(s)] for s in range(len(placement))]
    return Held(groups, own, shared, state, copied, over_ipus(division, placement, ipus))


def _shared_name(part: Part) -> str:
    return f"shared {part.leaf}" if part.rows is None else f"shared {part.leaf} {part.rows[0]}"


def make_stage(
    division: Division,
    held: Held,
    microbatch: Batch,
    s: int,
    *,
    name: str,
    ipu: Any,
    recompute: Any = "none",
    outputs: Tree = 0,
    in_place: bool = False,
) -> Stage:
    """Return stage `s` of a divided function, on this IPU.

    Args:
        division: the divided function.
        held: who holds weights and state.
        microbatch: a tree with the paths of a micro-batch.
        s: the number of the stage.
        name, ipu, recompute: as for `Stage`.
        outputs: a tree like the function's outputs; a loss is one leaf.
        in_place: whether it has no backward, so that a scan over layers can replace their state where it is.
    """
    trace, piece, messages, own = division.trace, division.pieces[s], division.messages, held.own[s]
    groups = {name: held.groups[name] for name in filter(None, [own, *held.shared[s]])}
    at = {part: (name, number) for name, parts in groups.items() for number, part in enumerate(parts)}
    weights = [_Held.of(division.parts[v], at, v) for v in piece.weights]
    weights.sort(key=lambda one: one.group != own)
    at = {part: ("", number) for number, part in enumerate(held.state[s])}
    of_state = [_Held.of(division.of_state[v], at, v) for v in piece.state]
    received = messages[s - 1] if s else []
    named = zip(jax.tree.leaves_with_path(microbatch), trace.batch, strict=True)
    batch = [(path, v) for (path, _), v in named if v in piece.inputs]
    keys = [v for v in trace.key if v in piece.inputs]
    constants = [(value, v) for v, value in trace.constants.items() if v in piece.inputs]
    inputs = [one.var for one in weights] + received + [v for _, v in batch] + keys
    inputs += [*(one.var for one in of_state), *(v for _, v in constants)]
    is_last = s == len(messages)
    y = jax.tree.unflatten(jax.tree.structure(outputs), trace.outputs) if is_last else tuple(messages[s])
    new_state = [value.new for value in division.state_of(s)]
    of_aux = {str(k): trace.aux[k] for k in division.aux_of(s)}
    results, treedef = jax.tree.flatten(Outputs(y, state=new_state or None, aux=of_aux or None))
    equations = piece.equations
    if in_place:
        old = {division.of_state[v]: v for v in piece.state}
        new = [value for value in division.state_of(s) if value.part in old and not isinstance(value.new, core.Literal)]
        equations = [replacing_in_place(eqn, {value.new: old[value.part] for value in new}) for eqn in equations]
    shards = held.over.shards(division, s)
    assert not isinstance(shards, Blocked), "what is split is read by shards alone"
    if shards:
        equations = on_shards(equations, shards, held.over.ipus)
    run = core.jaxpr_as_fun(part_of(trace.closed, inputs, equations, results))

    def without(variables: Sequence[Var], values: Sequence[Value]) -> list[Value]:
        """Return values whose gradients stop where none goes from the loss to trained weights."""
        none = [v in trace.made_by and v not in trace.differentiated for v in variables]
        return [lax.stop_gradient(x) if n else x for x, n in zip(values, none, strict=True)]

    def fn(
        params: Params, x: Tree, microbatch: Batch, *, shared: Tree = None, state: Tree = None, key: Key = None
    ) -> Outputs:
        given = {own: params, **(shared or {})}
        outs = run(
            *(_trained(one.read(given[one.group]), one.var, shards, held.over.ipus) for one in weights),
            *(with_keys(value, v.aval) for v, value in zip(received, without(received, x or ()), strict=True)),
            *leaves_at(microbatch, [path for path, _ in batch]),
            *([key] if keys else []),
            *(one.read(state) for one in of_state),
            *(value for value, _ in constants),
        )
        if not is_last:  # else B would compute what no weight waits for
            outs[: len(y)] = without(y, outs[: len(y)])
        found = jax.tree.unflatten(treedef, outs)
        return dataclasses.replace(found, y=jax.tree.map(without_keys, found.y))

    options: dict[str, Any] = {"name": name, "recompute": recompute, "shared": held.shared[s]}
    options |= {"state": f"stage {s}" if held.state[s] else None, "random": "same" if keys else False}
    return Stage(fn, own, ALL_IPUS if ipu is None else ipu, **options)


def _trained(value: Value, var: Var, shards: Mapping[Var, int], ipus: int) -> Value:
    """Return a weight as it is read: the padding of a shard gets no gradient."""
    dim = shards.get(var)
    has_padding = dim is not None and var.aval.shape[dim] % ipus > 0
    return trained_but_for_padding(value, dim, var.aval.shape[dim]) if has_padding else value


class _Held(NamedTuple):
    """A leaf of a group that a stage reads: its number there, its rows (None: all) along an axis, and its variable."""

    group: str
    number: int
    rows: tuple[int, int] | None
    axis: int
    var: Var

    @classmethod
    def of(cls, part: Part, at: Mapping[Part, tuple[str, int]], var: Var) -> "_Held":
        """Return the part, or the held one around it; `at` has the group and the number of each that is held."""
        if part in at or part.rows is None:
            return cls(*at[part], None, 0, var)
        held = next(held for held in at if held.holds(part))
        first = 0 if held.rows is None else held.rows[0]
        return cls(*at[held], (part.rows[0] - first, part.rows[1] - first), part.axis, var)

    def read(self, leaves: Sequence[Value]) -> Value:
        leaf = leaves[self.number]
        return leaf if self.rows is None else lax.slice_in_dim(leaf, *self.rows, axis=self.axis)


def replacing_in_place(eqn: Eqn, replaced: Mapping[Var, Var]) -> Eqn:
    """Return the equation of a scan that carries the stacked inputs that it replaces, each by one of its results.

        scan(layer, x, (weights, cache)) -> x, new cache       XLA keeps the old cache until the last layer has the new
        scan(layer, (x, cache), weights) -> (x, new cache)     each layer writes its row over the old one

    Only for a forward pass: the backward of the second scan would keep the whole cache of each layer.

    Args:
        eqn: any equation; only a scan changes.
        replaced: per new value, the old one.
    """
    if eqn.primitive.name != "scan":
        return eqn
    params = eqn.params
    fixed, carry, xs = in_scan_parts(params, list(eqn.invars))
    ys = eqn.outvars[len(carry) :]
    at = [(xs.index(replaced[new]), j) for j, new in enumerate(ys) if replaced.get(new) in xs]
    if not at:
        return eqn
    read, written = [i for i, _ in at], [j for _, j in at]
    body, length = core.jaxpr_as_fun(params["jaxpr"]), params["length"]
    others = [k for k in range(len(xs)) if k not in read]

    def run(fixed: list[Value], carry: list[Value], caches: list[Value], xs: list[Value]) -> Tree:
        def layer(carried: Tree, xs: list[Value]) -> tuple[Tree, list[Value]]:
            number, carry, caches = carried
            row = length - 1 - number if params["reverse"] else number
            rows = dict(zip(others, xs, strict=True))
            rows |= {
                i: lax.dynamic_index_in_dim(cache, row, keepdims=False) for i, cache in zip(read, caches, strict=True)
            }
            outs = body(*fixed, *carry, *(rows[i] for i in range(len(rows))))
            carry, new = outs[: len(carry)], outs[len(carry) :]
            caches = [
                lax.dynamic_update_index_in_dim(cache, new[j], row, 0) for j, cache in zip(written, caches, strict=True)
            ]
            return (number + 1, carry, caches), [y for j, y in enumerate(new) if j not in written]

        options = {name: params[name] for name in ("reverse", "unroll")}
        (_, carry, caches), ys = lax.scan(layer, (0, carry, caches), xs, length, **options)
        return carry, caches, ys

    results = [
        *eqn.outvars[: len(carry)],
        *(ys[j] for j in written),
        *(y for j, y in enumerate(ys) if j not in written),
    ]
    (made,) = equations(run, (fixed, carry, [xs[i] for i in read], [xs[i] for i in others]), results, like=eqn)
    return made
