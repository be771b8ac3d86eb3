"""Make stages of a whole loss function: trace it, cut it, and give each stage its own equations and weights.

loss(params, micro_batch)  --traced-->  trace  --cut-->  Stage 0, Stage 1, ...  and who holds which leaf of `params`
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from ipu_jax.base import facts
from ipu_jax.base.annotations import Batch, Function, Key, Params, Tree, Value
from ipu_jax.base.checks import as_int, check_choice, in_line
from ipu_jax.base.showing import Table
from ipu_jax.core.analysis.balance import flops_of_stages
from ipu_jax.core.cutting import given
from ipu_jax.core.cutting.concurrent_head import cut_around, with_concurrent_head
from ipu_jax.core.cutting.cut import STAGE_END, Cut, Places, work_of
from ipu_jax.core.cutting.description import described, names_of
from ipu_jax.core.cutting.dividing import divide, small_values
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.everywhere import check_outside, is_everywhere
from ipu_jax.core.cutting.holders import Holders, cut_alike
from ipu_jax.core.cutting.lost import reasons
from ipu_jax.core.cutting.module_trees import check_equinox, check_linen
from ipu_jax.core.cutting.order import by_weights, holding, runs_apart
from ipu_jax.core.cutting.own_derivatives import check_cotangents, check_tied
from ipu_jax.core.cutting.scan_layers import ScanLayer
from ipu_jax.core.cutting.stages import Held, make_stage, who_holds
from ipu_jax.core.cutting.trace import FunctionTrace
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import check_weight
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.programs.cost import in_units
from ipu_jax.core.programs.segment import Message, MicrobatchInputs
from ipu_jax.core.stage import Stage

_SAVED, _SAVED_OF_ALL = 0.15, 0.05
"""What the largest IPU must save, of its weights without tied ones, and of all, for an order by weights."""
_WORK_FOR_WEIGHTS: Final = 2 / 3
"""How much more work the busiest IPU may have, relative to what it takes off the weights: a third for half of them."""
_BY_WEIGHTS: Final = "operations that read the same weights are in one stage, wherever they are in the function"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A loss function, and for what to cut it: the arguments of `Pipeline.from_function`.

    Attributes:
        places: the IPU of each stage; concurrent stages, None, are there only in a schedule that was given as it is.
        ipus: the number of IPUs.
        names: the names after which it is cut, or None.
        layers: per IPU the number of its layers, or -1; None: stages have equal work.
        mesh: the mesh that its trace is for, if the function names further axes of one.
        head: "local", or "concurrent": its head is put on all IPUs.
        cast: casts weights and micro-batch before a function gets them, or None.

    Raises:
        ValueError: the loss is not callable, or `costs` or `head` is unknown.
    """

    loss: Function
    params: Params
    microbatch: Batch
    places: Sequence[int | None]
    ipus: int
    state: Tree = None
    frozen: Tree = None
    names: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    costs: str = "counted"
    recompute: Any = "auto"
    mesh: Mesh | None = None
    head: str = "local"
    cast: Callable[[Tree], Tree] | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss):
            swapped = ": loss and params are swapped" if callable(self.params) else ""
            found = f"loss={in_line(self.loss):.60} is not callable{swapped}"
            raise ValueError(f"{found}: give a function of (params, micro_batch)")
        check_choice("costs", self.costs, ("counted", "traced"))
        check_choice("head", self.head, ("local", "concurrent"))


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A loss function as stages, which `Pipeline` takes in place of a list of them.

    Attributes:
        stages: the stages.
        weights, state: which group holds which part of the user's trees; `state` is None without state.
        call: the function as it was traced, or the function itself if its trace is for one mesh:
            `call(params, state, micro_batch, key)` returns loss, aux and new state.
        aux: the structure of its aux.
        aux_home: per leaf of the aux, the stage that returns it.
        microbatch: the tree of shapes of one micro-batch.
        key: the shape of its random key, or None.
        trace: what was cut.
        cut: where it was cut.
        source: what it was cut from, in shapes.
        outputs: the shapes of what the function returns; of a loss function, its loss.
        resized: cuts the function for other micro-batches, along the stages of another `FunctionModel`.
        describe: returns why, as lines and a table.
    """

    stages: tuple[Stage, ...]
    weights: PackedLayout
    state: PackedLayout | None
    call: Function
    aux: Tree
    aux_home: tuple[int, ...]
    microbatch: Batch
    key: Key
    trace: FunctionTrace
    cut: Cut
    source: Source
    outputs: Tree
    resized: Callable[[Batch, "FunctionModel"], "FunctionModel"]
    describe: Callable[[], list[str | Table]]

    @functools.cached_property
    def described(self) -> list[str | Table]:
        """Return why it is cut there, as lines and a table; only who prints it waits for them."""
        return self.describe()

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def again(self, **changed: Any) -> "FunctionModel":
        """Return the stages of a changed function, or for other weights, cut anew."""
        return model_of(dataclasses.replace(self.source, **changed))

    def on(self, mesh: Mesh) -> "FunctionModel":
        """Return the stages on a mesh, which are traced anew if their trace is for another one, or for other IPUs."""
        changed: dict[str, Any] = {} if self.source.mesh in (None, mesh) else {"mesh": mesh}
        if None in self.cut.ipus and mesh.shape[IPU_AXIS] != self.source.ipus:
            changed["ipus"] = mesh.shape[IPU_AXIS]
        return self.again(**changed) if changed else self

    def of_microbatch(self, batch: Batch, leading: int) -> "FunctionModel":
        """Return the function for micro-batches of a batch, in stages that hold what these stages hold.

        Args:
            batch: arrays or shapes; dims can have other sizes than those for which the function was cut.
            leading: how many dims are before a micro-batch's.

        Raises:
            ValueError: it cannot be cut so, or does not take these sizes.
        """
        found = {jax.tree_util.keystr(path): leaf.shape[leading:] for path, leaf in jax.tree.leaves_with_path(batch)}
        shape_of = lambda path, leaf: leaf.update(shape=tuple(found[jax.tree_util.keystr(path)]))
        microbatch = jax.tree.map_with_path(shape_of, self.microbatch)
        if jax.tree.leaves(microbatch) == jax.tree.leaves(self.microbatch):
            return self
        try:
            with facts.during("cutting a function for other sizes"):
                return self.resized(microbatch, self)
        except Exception as error:
            old, new, kind = _sizes(self.microbatch), _sizes(microbatch), type(error).__name__
            raise ValueError(
                f"the function was cut for micro-batches of {old}, and raises {kind} for {new}: {error}; give sizes "
                "that it takes"
            ) from error

    def check(self, batch: Batch, leading: int, key: Key) -> None:
        """Raise `ValueError` unless batch (after `leading` dims) and key are like what the function was cut for.

        Dims can have other sizes.
        """
        if key is not None and self.key is not None and key.dtype != self.key.dtype:
            raise ValueError(
                f"key is a {key.dtype}, and the function was cut for a {self.key.dtype}: make it with "
                "jax.random.key(seed)"
            )
        found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(batch)}
        cut_for = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(self.microbatch)}
        for path in [*cut_for, *found]:
            one, other = cut_for.get(path), found.get(path)
            if one is None or other is None:
                is_what = "missing" if other is None else "unknown"
                raise ValueError(
                    f"batch{path} is {is_what}: the function was cut for micro-batches with {', '.join(cut_for)}"
                )
            shape = tuple(other.shape[leading:])
            if len(shape) != len(one.shape) or given.held_dtype(other) != one.dtype:
                raise ValueError(
                    f"batch{path} has micro-batches of {other.dtype}{list(shape)}, and the function "
                    f"was cut for {one.dtype}{list(one.shape)}: give this dtype and this number of dims, of any sizes"
                )

    def of_stages(self, aux: Tree) -> dict[str, Tree]:
        """Return the function's aux as the stages return it: `{stage: {number: leaf}}`."""
        found: dict[str, dict[str, Tree]] = {}
        for k, (leaf, home) in enumerate(zip(jax.tree.leaves(aux), self.aux_home, strict=True)):
            found.setdefault(self.stages[home].name, {})[str(k)] = leaf
        return found

    def whole_aux(self, aux: dict[str, Tree]) -> Tree:
        """Return the function's aux from what the stages returned."""
        leaves = {int(k): leaf for of_stage in aux.values() for k, leaf in of_stage.items()}
        return jax.tree.unflatten(self.aux, [leaves[k] for k in range(len(self.aux_home))])

    def unsharded(
        self, params: Params, _: Message, inputs: MicrobatchInputs, state: Tree
    ) -> tuple[Message, Tree, Tree]:
        """Run the function itself, called as a `Segment` of all its stages is."""
        key = next((key for key in inputs.keys if key is not None), None)
        if key is None and self.key is not None:
            key = jax.random.key(0)  # no stage takes one: the results do not depend on it
        loss, aux, new_state = self.call(params, None if self.state is None else state, inputs.microbatch, key)
        return Message(loss), state if new_state is None else new_state, self.of_stages(aux)


def _sizes(microbatch: Batch) -> str:
    return ", ".join(
        f"{jax.tree_util.keystr(path)} {list(leaf.shape)}".strip()
        for path, leaf in jax.tree.leaves_with_path(microbatch)
    )


def model_of(source: Source, like: FunctionModel | None = None) -> FunctionModel:
    """Trace and cut a loss function, or raise a `ValueError` that says what cannot be cut.

    Args:
        source: the function.
        like: the same function for micro-batches of other sizes, whose stages hold the weights already; or None.
    """
    is_frozen = given.frozen_leaves(source.frozen, source.params)
    check_linen(source.params, is_frozen)
    state = None if source.state is None else given.shapes("state", source.state)
    call = given.LossCall(source.loss, state, is_frozen, source.cast)
    check_equinox(source.loss, source.params, call.takes_key)
    params = given.shapes("params", source.params, weak=True)
    microbatch = given.shapes("micro_batch", source.microbatch)
    trace, results, key = call.traced(params, microbatch, source.mesh, source.ipus)
    trace.frozen = {v for v, frozen in zip(trace.params, is_frozen, strict=True) if frozen}
    trace = trace.with_new_state_early()
    for (path, leaf), frozen in zip(jax.tree.leaves_with_path(params), is_frozen, strict=True):
        check_weight(f"params{jax.tree_util.keystr(path)}", leaf.dtype, frozen)
    given.check_loss(trace, results[0])
    given.check_effects(trace)
    given.check_constants(trace)
    given.warn_of_constant_keys(trace)
    given.check_marks(trace, [STAGE_END, *(source.names or ())])
    check_cotangents(trace)
    check_outside(trace.operations)
    written, line = trace, list[str]()
    holders = like and Holders(
        like.stages, like.weights, like.state, ipus=source.ipus, replaces_state=state is not None
    )
    if source.head == "concurrent":
        trace = with_concurrent_head(trace, source.ipus, source.mesh, (holders and holders.split(trace)) or None)
    shaped = dataclasses.replace(source, params=params, state=state, microbatch=microbatch)
    if like is None or holders is None:
        cut, line = _best_cut(trace, work_of(trace), shaped)
        _check_places(source.places, cut.ipus)
        division = divide(trace, cut.of_stages)
        held, names = who_holds(division, cut.ipus, source.ipus), names_of(division)
        weights, of_state = held.layout(params), None if state is None else held.state_layout(state)
    else:
        cut = cut_alike(trace, holders, like.trace, like.cut, state)
        division = dataclasses.replace(divide(trace, cut.of_stages), placed=holders.of_new_state(trace))
        held, names = holders.held(division), [stage.name for stage in like.stages]
        weights, of_state = like.weights, like.state
    check_tied(division)
    stages = _stages_of(division, held, names, cut.ipus, shaped)
    paths = weights.paths, of_state.paths if of_state else ()
    return FunctionModel(
        stages=stages,
        weights=weights,
        state=of_state,
        call=unsharded_call(written, call, source.mesh, (params, state, microbatch, key), results),
        aux=jax.tree.structure(results[1]),
        aux_home=tuple(division.aux_home),
        microbatch=microbatch,
        key=key,
        trace=trace,
        cut=cut,
        source=shaped,
        outputs=results[0],
        resized=lambda other, like: model_of(dataclasses.replace(shaped, microbatch=other), like),
        describe=lambda: [*described(division, cut, stages, held, *paths), *line],
    )


def _check_places(asked: Sequence[int | None], found: Sequence[int | None]) -> None:
    if None in asked and [*asked] != [*found]:
        raise ValueError(
            f"schedule places its stages on {tuple(asked)}, and the function, whose calls of ipu_jax.everywhere are "
            f"concurrent stages (None), on {tuple(found)}: give the schedule's name, or a schedule for this placement"
        )


def _stages_of(
    division: Division, held: Held, names: Sequence[str], placement: Sequence[int | None], source: Source
) -> tuple[Stage, ...]:
    make = functools.partial(make_stage, division, held, source.microbatch, recompute=source.recompute)
    return tuple(make(s, name=name, ipu=ipu) for s, (name, ipu) in enumerate(zip(names, placement, strict=True)))


def _traced_work(places: Places, source: Source) -> dict[int, float]:
    """Return the FLOPs of F and B of each operation, by its id.

    They are counted in what XLA makes of all between two waists, and divided over these operations as their own counts.
    """
    at = [*np.flatnonzero(places.allowed & places.is_waist), len(places.operations) - 1]
    of_stages = places.cut_at([t + 1 for t in at[:-1]], [0] * len(at)).of_stages
    ipus = [None if any(map(is_everywhere, of_stage)) else 0 for of_stage in of_stages]
    division = divide(places.trace, of_stages)
    held = who_holds(division, ipus, 1)
    stages = _stages_of(division, held, names_of(division), ipus, source)
    groups = held.layout(source.params).split(source.params)
    states = None if source.state is None else held.state_layout(source.state).split(source.state)
    costs = flops_of_stages(stages, groups, source.microbatch, states, mesh=source.mesh, ipus=source.ipus)
    found, first = dict[int, float](), 0
    for of_stage, cost in zip(of_stages, costs, strict=True):
        counted = places.work[first : first + len(of_stage)]
        parts = counted / counted.sum() if counted.any() else np.full(len(of_stage), 1 / len(of_stage))
        found |= zip(map(id, of_stage), (cost * parts).tolist(), strict=True)
        first += len(of_stage)
    return found


def _best_cut(trace: FunctionTrace, work: dict[int, float], source: Source) -> tuple[Cut, list[str]]:
    """Return where a function is cut: in its own order, or in the order of its weights, and then a line about it."""
    places = Places(trace, work)
    if source.costs == "traced":
        work = _traced_work(places, source)
        places = Places(trace, work)
    local, marks = [ipu for ipu in source.places if ipu is not None], source.names
    if marks is None and len(places.marked([STAGE_END])):
        marks = [STAGE_END]
    if source.layers is not None:
        ends = [t + 1 for t in ends_of_layers(places, source.layers, marks)]
        cut = cut_around(places, local, marks or (), lambda rest: rest.cut_at(ends, local, marked=True))
        assert cut is not None, "all its places are given"
        return cut, []
    cut_of = lambda places: cut_around(places, local, marks or (), lambda rest: rest.cut(local, marks))
    cut = cut_of(places)
    if cut is not None and _is_even(trace, cut, work):
        return cut, []
    reads = trace.reads_but_for(small_values(trace))
    other = cut_of(Places(trace, work, by_weights(trace, reads)))
    if other is None:
        if cut is None:
            raise ValueError(_too_few(places, len(local), marks, source))
        return cut, []
    if cut is None:
        return other, [_BY_WEIGHTS]
    before, after = (holding(trace, reads, found.of_stages, found.ipus) for found in (cut, other))
    tied = before.shared.keys() & after.shared.keys()
    saved = before.largest(tied) - after.largest(tied)
    if saved <= max(_SAVED * before.largest(tied), _SAVED_OF_ALL * before.largest()):
        return cut, []
    sizes = [in_units(held.largest(), "B") for held in (after, before)]
    busiest = [max(found.work_per_ipu) for found in (cut, other)]
    if busiest[1] <= (1 + _WORK_FOR_WEIGHTS * saved / before.largest(tied)) * busiest[0]:
        return other, [f"{_BY_WEIGHTS}: an IPU has up to {sizes[0]} of them, and {sizes[1]} otherwise"]
    return cut, [
        f"ordered by weights, an IPU would have up to {sizes[0]} of them, but the busiest IPU "
        f"{busiest[1] / busiest[0] - 1:.0%} more work: take more layers, or fewer IPUs"
    ]


def _is_even(trace: FunctionTrace, cut: Cut, work: dict[int, float]) -> bool:
    """Return whether no other order can have much fewer weights on the largest IPU."""
    held = holding(trace, trace.reads, cut.of_stages, cut.ipus)
    return (1 - _SAVED) * held.largest() <= held.even or not runs_apart(cut.of_stages, work)


def _too_few(places: Places, stages: int, marks: Sequence[str] | None, source: Source) -> str:
    """Say why a function cannot be cut into this number of stages."""
    if marks is not None:
        count, by = len(places.marked(marks)), "stage_end" if source.names is None else f"cuts={list(marks)!r}"
        return (
            f"{by} marks {count} place{'s' * (count != 1)} of the function, and {stages} stages need {stages - 1}: "
            "mark more values, outside of scans and other functions with a body, or take fewer IPUs or rounds"
        )
    count = int(places.allowed.sum())
    found = f"it has {count} places between its operations{', and a stage would have no work' * (count >= stages - 1)}"
    of_state = [f"state{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(source.state)]
    why = "; ".join([found, *reasons(places, stages, of_state)])
    return f"{stages} stages are more than the function can be cut into: {why}; or take fewer IPUs or rounds"


def unsharded_call(
    trace: FunctionTrace, call: given.LossCall, mesh: Mesh | None, shapes: tuple[Tree, ...], results: Tree
) -> Function:
    """Return a traced function; it is not traced again, since a function may compare the types of its arguments.

    If its trace is for one mesh, or if arguments have other nodes, such as an `OrderedDict`, it is the function itself.

    Args:
        trace: the trace.
        call: the function of params, state, micro-batch and key.
        mesh: the mesh that the trace is for, or None.
        shapes: the four arguments, in shapes.
        results: the shapes of the results.
    """
    if mesh is not None:
        return call
    params, _, microbatch, key = shapes
    closed = call.on_one_ipu(params, microbatch, key) if any(map(is_everywhere, trace.operations)) else trace.closed
    run, structures = core.jaxpr_as_fun(closed), [*map(jax.tree.structure, (shapes, results))]

    def run_traced(*args: Value) -> Tree:
        if jax.tree.structure(args) != structures[0]:
            return call(*args)
        return jax.tree.unflatten(structures[1], run(*jax.tree.leaves(args)))

    return run_traced


def checked_counts(layers_per_ipu: Any, stages: int, ipus: int) -> list[int]:
    """Return `layers_per_ipu` as ints, as optimum-graphcore takes them.

    layers_per_ipu=[1, 2, -1, -1]     layer 0 | layers 1, 2 | layers 3 to 5 | layers 6 to 9      of ten layers

    A layer ends where the function marks a value. In a function without marks, layers are the iterations of its scans
    over stacked weights. Operations before the first layer are on the first IPU, operations after the last layer on the
    last.

    Raises:
        ValueError: it does not give each IPU a number of at least 1, or -1; or there are several stages on an IPU.
    """
    listed = list(layers_per_ipu) if isinstance(layers_per_ipu, Iterable) else []
    counts, value = [as_int(count) or 0 for count in listed], f"layers_per_ipu={layers_per_ipu!r}"
    if len(counts) != ipus or any(count < 1 and count != -1 for count in counts):
        raise ValueError(
            f"{value} does not give numbers of layers for {ipus} IPUs: give each a number of at least 1, or -1 for an "
            "even share of the other layers"
        )
    if stages != ipus:
        raise ValueError(
            f"{value} gives each IPU one stage, and the schedule has {stages} stages on {ipus} IPUs: take a schedule "
            "with one on each, such as 'grouped' or '1f1b', or leave it out"
        )
    return counts


def ends_of_layers(places: Places, counts: Sequence[int], names: Sequence[str] | None) -> list[int]:
    """Return the places after the last layer of each IPU but the last; the last -1 also gets the
    remainder.

    Args:
        places: the places at which the function can be cut.
        counts: from `checked_counts`.
        names: the names of the values that end layers; None: each iteration of a scan is a layer.

    Raises:
        ValueError: the function has no layers, or another number of them, or cannot be cut after one.
    """
    value, operations = f"layers_per_ipu={[*counts]}", enumerate(places.operations)
    ends = [t for t, op in operations if isinstance(op, ScanLayer)] if names is None else places.marked(names)
    sharing = [ipu for ipu, count in enumerate(counts) if count == -1]
    left = len(ends) - sum(count for count in counts if count != -1)
    if left < len(sharing) or (left and not sharing):
        raise ValueError(
            f"{value} cannot place the {len(ends)} layers of the function: give numbers that add up to {len(ends)}, "
            "with at least 1 for each -1; a layer ends at stage_end(x), or is an iteration of a scan over weights"
        )
    even, more = divmod(left, len(sharing) or 1)
    each = [even + more * (ipu == sharing[-1]) if count == -1 else count for ipu, count in enumerate(counts)]
    found = [ends[end - 1] for end in itertools.accumulate(each[:-1])]
    for ipu, t in enumerate(found):
        if not places.allowed[t]:
            raise ValueError(f"{value} ends IPU {ipu} where the function cannot be cut: leave it out, or move the mark")
    return found


def cut_on(mesh_of: Callable[..., Mesh], source: Source, axes: Mapping[str, int] | None) -> tuple[FunctionModel, Mesh]:
    """Return a loss function as stages, and a mesh with further axes.

    If none are given, and the function names axes of size 1 of the mesh of `jax.set_mesh`, it gets these.
    """
    mesh = mesh_of(**(axes or {}))
    try:
        return model_of(dataclasses.replace(source, mesh=mesh) if axes else source), mesh
    except given.NeedsAxesError as needs:
        if {*needs.axes.values()} != {1}:
            raise
        return cut_on(mesh_of, source, needs.axes)
