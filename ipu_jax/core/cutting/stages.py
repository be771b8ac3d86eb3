"""Make the stages of a divided function: each with its equations, and with the weights that it reads.

stage 0     params "stage 0": embed's positions, layers 0-3      shared "shared 0": the embedding
stage 1     params "stage 1": layers 4-7
stage 2     params "stage 2": layers 8-9, the last norm          shared "shared 0": the embedding, transposed
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from ipu_jax.base.annotations import Batch, Key, Params, Tree
from ipu_jax.base.jaxprs import part_of
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.layout.whole_tree import Part, leaves_at
from ipu_jax.core.stage import Outputs, Stage


@dataclasses.dataclass
class Held:
    """Who holds the weights.

    Attributes:
        groups: per group its parts.
        own, shared: per stage the names of its own group and of the shared ones that it reads.
        everywhere: the parts of shared groups, and the stages that read them.
    """

    groups: dict[str, list[Part]]
    own: list[str | None]
    shared: list[tuple[str, ...]]
    everywhere: dict[Part, list[int]]


def who_holds(division: Division, placement: Sequence[int]) -> Held:
    """Give each part to the group of its stage; stages of one IPU that share one get one group."""
    users: dict[Part, list[int]] = {}
    for s, piece in enumerate(division.pieces):
        for var in piece.weights:
            users.setdefault(division.parts[var], []).append(s)
    everywhere = {part: stages for part, stages in users.items() if len({placement[s] for s in stages}) > 1}
    lead = list(range(len(placement)))  # per stage, the stage whose group it shares
    for part, stages in users.items():
        if part not in everywhere:
            first = min(lead[s] for s in stages)
            old = {lead[s] for s in stages}
            lead = [first if at in old else at for at in lead]
    groups: dict[str, list[Part]] = {}
    for part, stages in users.items():
        name = _shared_name(part) if part in everywhere else f"stage {lead[stages[0]]}"
        groups.setdefault(name, []).append(part)
    used = {part.leaf for part in users}
    for k in range(len(division.trace.params)):
        if k not in used:  # nothing reads it
            groups.setdefault("stage 0", []).append(Part(k))
    own = [f"stage {at}" if f"stage {at}" in groups else None for at in lead]
    of_pieces = [[division.parts[var] for var in piece.weights] for piece in division.pieces]
    shared = [tuple(dict.fromkeys(_shared_name(p) for p in parts if p in everywhere)) for parts in of_pieces]
    return Held(groups, own, shared, everywhere)


def _shared_name(part: Part) -> str:
    return f"shared {part.leaf}" if part.rows is None else f"shared {part.leaf} {part.rows[0]}"


def make_stage(
    division: Division, s: int, name: str, ipu: int, held: Held, microbatch: Batch, *, recompute: Any
) -> Stage:
    """Return stage `s` of a divided function, on this IPU; it takes micro-batches with the paths of `microbatch`."""
    trace, piece, messages = division.trace, division.pieces[s], division.messages
    received, own, (aux, new_state) = messages[s - 1] if s else [], held.own[s], division.returned(s)
    groups = filter(None, [own, *held.shared[s]])
    at = {part: (group, k) for group in groups for k, part in enumerate(held.groups[group])}
    weights_read = sorted(((*at[division.parts[v]], v) for v in piece.weights), key=lambda read: read[0] != own)
    named = zip(jax.tree.leaves_with_path(microbatch), trace.batch, strict=True)
    batch = [(path, v) for (path, _), v in named if v in piece.inputs]
    keys = [v for v in trace.key if v in piece.inputs]
    constants = [(value, v) for v, value in trace.constants.items() if v in piece.inputs]
    inputs = [v for *_, v in weights_read] + received + [v for _, v in batch] + keys
    inputs += [*(trace.state[k] for k in new_state), *(v for _, v in constants)]
    y, of_aux = trace.loss if s == len(messages) else tuple(messages[s]), {str(k): trace.aux[k] for k in aux}
    results = Outputs(y, state=[trace.new_state[k] for k in new_state] or None, aux=of_aux or None)
    outputs, treedef = jax.tree.flatten(results)
    run = core.jaxpr_as_fun(part_of(trace.closed, inputs, piece.equations, outputs))

    def fn(
        weights: Params, x: Tree, microbatch: Batch, *, shared: Tree = None, state: Tree = None, key: Key = None
    ) -> Outputs:
        given = {own: weights, **(shared or {})}
        outs = run(
            *(given[group][k] for group, k, _ in weights_read),
            *(with_keys(value, v.aval) for v, value in zip(received, x or (), strict=True)),
            *leaves_at(microbatch, [path for path, _ in batch]),
            *([key] if keys else []),
            *(state or []),
            *(value for value, _ in constants),
        )
        found = jax.tree.unflatten(treedef, outs)
        return dataclasses.replace(found, y=jax.tree.map(without_keys, found.y))

    state, random = f"stage {s}" if new_state else None, "same" if keys else False
    return Stage(fn, own, ipu, name=name, recompute=recompute, state=state, random=random, shared=held.shared[s])
