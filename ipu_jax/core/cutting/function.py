"""Make stages of a whole loss function: trace it, cut it, and give each stage its own equations and weights.

loss(params, micro_batch)  --traced-->  program  --cut-->  Stage 0, Stage 1, ...  and who holds which leaf of `params`
"""

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch, Dtype, Function, Jaxpr, Key, Params, Tree, Value
from ipu_jax.base.checks import check_choice
from ipu_jax.base.jaxprs import traced_on
from ipu_jax.base.showing import Table
from ipu_jax.core.analysis.balance import measure_costs
from ipu_jax.core.cutting.cut import STAGE_END, Cut, Places
from ipu_jax.core.cutting.description import described, names_of
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.program import Program, at_line, name_of, traced
from ipu_jax.core.cutting.stages import Held, make_stage, who_holds
from ipu_jax.core.programs.segment import Message, MicrobatchInputs
from ipu_jax.core.stage import Stage
from ipu_jax.core.weights.packed_layout import check_array
from ipu_jax.core.weights.whole_tree import Part, WholeTree, spread


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A loss function as stages.

    Attributes:
        stages: the stages.
        weights, state: the user's trees, and who holds which part; `state` is None without state.
        call: the function as it was traced, or the function itself if its trace is for one mesh:
            `call(params, state, micro_batch, key)` returns loss, aux and new state.
        aux: the structure of its aux.
        aux_home: per leaf of the aux, the stage that returns it.
        microbatch: the tree of shapes of one micro-batch.
        key: the shape of its random key, or None.
        cut: where it was cut.
        source: the arguments of `model_of`.
        described: why, as lines and a table.
    """

    stages: tuple[Stage, ...]
    weights: WholeTree
    state: WholeTree | None
    call: Function
    aux: Tree
    aux_home: tuple[int, ...]
    microbatch: Batch
    key: Key
    cut: Cut
    source: dict[str, Any]
    described: list[str | Table]

    def again(self, **changed: Any) -> "FunctionModel":
        """Return the stages of a changed function, or for other weights, cut anew."""
        return model_of(**{**self.source, **changed})

    def on(self, mesh: Mesh) -> "FunctionModel":
        """Return the stages on a mesh, which are traced anew if their trace is for another one."""
        return self if self.source["mesh"] in (None, mesh) else self.again(mesh=mesh)

    def check(self, batch: Batch, leading: int, key: Key) -> None:
        """Raise `ValueError` unless batch (after `leading` dims) and key are like what the function was cut for."""
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
            if tuple(other.shape[leading:]) != one.shape or _dtype_of(other) != one.dtype:
                raise ValueError(
                    f"batch{path} has micro-batches of {other.dtype}{list(other.shape[leading:])}, and the function "
                    f"was cut for {one.dtype}{list(one.shape)}: give these, or cut the function for the others"
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
        loss, aux, new_state = self.call(params, state, inputs.microbatch, key)
        return Message(loss), state if self.state is None else new_state, self.of_stages(aux)


def model_of(
    loss: Function,
    params: Params,
    microbatch: Batch,
    places: Sequence[int | None],
    *,
    state: Tree,
    frozen: Tree,
    names: Sequence[str] | None,
    costs: str,
    recompute: Any,
    mesh: Mesh | None = None,
) -> FunctionModel:
    """Trace and cut a loss function for stages in these places. The arguments are as for `Pipeline.from_function`.

    If the function names further axes of a mesh, its trace is for this mesh only, and `mesh` is needed.
    """
    source = {**locals()}
    if not callable(loss):
        raise ValueError(f"loss={loss!r} is not callable: give a function of (params, micro_batch)")
    check_choice("costs", costs, ("counted", "traced"))
    placement = [ipu for ipu in places if ipu is not None]
    if len(placement) < len(places):
        raise ValueError(
            "schedule has concurrent stages, and a function is cut into local ones: give its name, or one without"
        )
    params, state, microbatch = _shapes((params, state, microbatch))
    takes_key = _takes_key(loss, state)
    call = _call(loss, state, takes_key=takes_key)
    key = jax.eval_shape(lambda: jax.random.key(0)) if takes_key else None
    trace = functools.partial(traced, call, params, state, microbatch, key)
    program, results = trace() if mesh is None else traced_on(mesh, trace)
    value, aux, _ = results
    _check_loss(program, value)
    _check_effects(program)
    is_frozen = spread("frozen", frozen or False, jax.tree.structure(params))
    found = Places(program, is_frozen)
    if costs == "traced":
        found.work = _traced_work(found, params, state, microbatch, recompute, mesh)
    cut = _best_cut(found, len(placement), names)
    division = Division(program, cut.ends)
    stages, weights, of_state, held = _stages_of(division, placement, params, state, recompute)
    return FunctionModel(
        stages=stages,
        weights=weights,
        state=of_state,
        call=_as_traced(program.closed, jax.tree.structure(results)) if mesh is None else call,
        aux=jax.tree.structure(aux),
        aux_home=tuple(division.aux_home),
        microbatch=microbatch,
        key=key,
        cut=cut,
        source=source,
        described=described(division, cut, [stage.name for stage in stages], placement, weights.paths, held.everywhere),
    )


def _stages_of(
    division: Division, placement: Sequence[int], params: Params, state: Tree, recompute: Any
) -> tuple[tuple[Stage, ...], WholeTree, WholeTree | None, Held]:
    """Return the stages, and who holds which part of the user's trees."""
    held, names = who_holds(division, placement), names_of(division)
    states = {f"stage {s}": [Part(k) for k in division.returned(s)[1]] for s in range(len(placement))}
    states = {name: parts for name, parts in states.items() if parts}
    stages = tuple(make_stage(division, s, names[s], ipu, held, recompute=recompute) for s, ipu in enumerate(placement))
    of_state = None if state is None else WholeTree.of("state", state, states)
    return stages, WholeTree.of("params", params, held.groups), of_state, held


def _traced_work(
    places: Places, params: Params, state: Tree, microbatch: Batch, recompute: Any, mesh: Mesh | None
) -> np.ndarray:
    """Return the FLOPs of F and B of what lies between any two places, at the operation before the second one."""
    ends = [*(np.flatnonzero(places.allowed & places.is_waist) + 1), len(places.operations)]
    division = Division(places.program, ends)
    stages, weights, of_state, _ = _stages_of(division, [0] * len(ends), params, state, recompute)
    states = None if of_state is None else of_state.split(state)
    work = np.zeros_like(places.work)
    work[np.array(ends) - 1] = measure_costs(stages, weights.split(params), microbatch, states, mesh=mesh)
    return work


def _best_cut(places: Places, stages: int, names: Sequence[str] | None) -> Cut:
    marks = names
    if names is None and len(places.marked([STAGE_END])):
        marks = [STAGE_END]
    cut = places.cut(stages, marks)
    if cut is not None:
        return cut
    if marks is not None:
        count, by = len(places.marked(marks)), "stage_end" if names is None else f"cuts={list(marks)!r}"
        raise ValueError(
            f"{by} marks {count} place{'s' * (count != 1)} of the function, and {stages} stages need {stages - 1}: "
            "mark more values, outside of scans and other functions with a body, or take fewer IPUs or rounds"
        )
    heaviest, share = places.heaviest
    operation = places.operations[heaviest] if places.operations else None
    held = f"; {share:.0%} of its work is one operation, {name_of(operation)}{at_line(operation)}" if operation else ""
    raise ValueError(
        f"{stages} stages are more than the function can be cut into: it has {int(places.allowed.sum())} places "
        f"between its operations{held}: take fewer IPUs or rounds, or write what is one operation as several"
    )


def _check_effects(program: Program) -> None:
    """Raise `ValueError` for effects that have an order, which the stages of several IPUs do not keep."""
    for operation in program.operations:
        names = [type(effect).__name__ for effect in operation.effects]
        if any("Ordered" in name and "Unordered" not in name for name in names):
            raise ValueError(
                f"the function has an ordered effect, {name_of(operation)}{at_line(operation)}: micro-batches run on "
                "several IPUs at once, in no order; give the callback ordered=False, or leave it out"
            )


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), _dtype_of(leaf)), tree)


def _dtype_of(leaf: Value) -> Dtype:
    """Return the dtype in which jax holds an array: NumPy's int64 and float64 become 32 bits wide, by default."""
    if hasattr(leaf, "dtype"):
        check_array("a leaf of params, micro_batch or state", leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def _takes_key(loss: Function, state: Tree) -> bool:
    """Return whether a function takes a random key: one required argument more than params, state and micro-batch."""
    others = 2 if state is None else 3
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [p for p in inspect.signature(loss).parameters.values() if p.kind in kinds and p.default is p.empty]
    if len(taken) not in (others, others + 1):
        form = "params, micro_batch" if state is None else "params, state, micro_batch"
        raise ValueError(
            f"loss takes {len(taken)} arguments, {', '.join(p.name for p in taken)}: give a function of ({form}), or "
            f"of ({form}, key)" + ("" if state is not None else "; a function with a state needs state=")
        )
    return len(taken) > others


def _call(loss: Function, state: Tree, *, takes_key: bool) -> Function:
    """Return the function as one of `(params, state, micro_batch, key)` that returns `(loss, aux, new state)`."""

    def call(params: Params, state_in: Tree, microbatch: Batch, key: Key) -> tuple[Value, Tree, Tree]:
        args = [params, *([] if state is None else [state_in]), microbatch, *([key] if takes_key else [])]
        result = loss(*args)
        results = list(result) if isinstance(result, tuple) else [result]
        required = 1 if state is None else 2
        if not required <= len(results) <= required + 1:
            forms = "loss, or (loss, aux)" if state is None else "(loss, new_state), or (loss, aux, new_state)"
            found = f"a tuple of {len(results)}" if isinstance(result, tuple) else "one value"
            raise ValueError(f"loss returns {found}: return {forms}")
        value, new_state = results[0], None if state is None else results[-1]
        aux = results[1] if len(results) > required else None
        if state is not None and _described(new_state) != _described(state):
            raise ValueError("loss returns a new state that is not like state: return the same tree, shapes and dtypes")
        return value, aux, new_state

    return call


def _described(tree: Tree) -> Tree:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _check_loss(program: Program, loss: Value) -> None:
    """Raise `ValueError` unless the function returns a float scalar."""
    found = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        made = program.made_by.get(program.loss)
        where = "" if made is None else at_line(made)
        raise ValueError(f"loss returns {found}{where}: return the micro-batch's mean loss, a float scalar")


def _as_traced(closed: Jaxpr, results: Tree) -> Function:
    """Return a traced function; it is not traced again, since a function may compare the types of its arguments."""
    run = core.jaxpr_as_fun(closed)

    def call(*args: Value) -> Tree:
        return jax.tree.unflatten(results, run(*jax.tree.leaves(args)))

    return call
