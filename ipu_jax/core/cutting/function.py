"""Make stages of a whole loss function: trace it, cut it, and give each stage the equations and weights that are its own.

loss(params, micro_batch)  --traced-->  program  --cut-->  Stage 0, Stage 1, ...  and who holds which leaf of `params`
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ipu_jax.base.jaxprs import part_of
from ipu_jax.core.cutting.cut import Cut, Places
from ipu_jax.core.cutting.description import described, names_of
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.origin import at_line
from ipu_jax.core.cutting.program import traced
from ipu_jax.core.programs.segment import Message, MicrobatchInputs
from ipu_jax.core.stage import Outputs, Stage
from ipu_jax.core.weights.whole_tree import Part, WholeTree

Placement = Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A loss function as stages.

    Attributes:
        stages: the stages.
        weights, state: the user's trees, and who holds which part; `state` is None without state.
        call: the function as it was traced: `call(params, state, micro_batch, key)` returns loss, aux and new state.
        aux: the structure of its aux.
        aux_home: per leaf of the aux, the stage that returns it.
        microbatch: the tree of shapes of one micro-batch.
        cut: where it was cut.
        described: why, as lines of text.
    """

    stages: tuple[Stage, ...]
    weights: WholeTree
    state: WholeTree | None
    call: Callable[..., Any]
    aux: Any
    aux_home: tuple[int, ...]
    microbatch: Any
    cut: Cut
    described: str = ""

    def check_batch(self, batch: Any, leading: int) -> None:
        """Raise `ValueError` unless the batch has the micro-batch's tree and shapes, after `leading` dims."""
        found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(batch)}
        cut_for = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(self.microbatch)}
        for path in [*cut_for, *found]:
            one, other = cut_for.get(path), found.get(path)
            if one is None or other is None:
                raise ValueError(
                    f"batch{path} is {'missing' if other is None else 'unknown'}: the function was cut for a micro-batch "
                    f"with the leaves {', '.join(cut_for)}"
                )
            if tuple(other.shape[leading:]) != one.shape or jax.dtypes.canonicalize_dtype(other.dtype) != one.dtype:
                raise ValueError(
                    f"batch{path} has micro-batches of {other.dtype}{list(other.shape[leading:])}, and the function was "
                    f"cut for {one.dtype}{list(one.shape)}: give these, or cut the function for the others"
                )

    def of_stages(self, aux: Any) -> dict[str, Any]:
        """Return the function's aux as the stages return it: `{stage: {number: leaf}}`."""
        found: dict[str, dict[str, Any]] = {}
        for k, (leaf, home) in enumerate(zip(jax.tree.leaves(aux), self.aux_home, strict=True)):
            found.setdefault(self.stages[home].name, {})[str(k)] = leaf
        return found

    def whole_aux(self, aux: dict[str, Any]) -> Any:
        """Return the function's aux from what the stages returned."""
        leaves = {int(k): leaf for of_stage in aux.values() for k, leaf in of_stage.items()}
        return jax.tree.unflatten(self.aux, [leaves[k] for k in range(len(self.aux_home))])

    def unsharded(self, params: Any, _: Message, inputs: MicrobatchInputs, state: Any) -> tuple[Message, Any, Any]:
        """Run the function itself, called as a `Segment` of all its stages is."""
        key = next((key for key in inputs.keys if key is not None), None)
        loss, aux, new_state = self.call(params, state, inputs.microbatch, key)
        return Message(loss), state if self.state is None else new_state, self.of_stages(aux)


def model_of(
    loss: Callable[..., Any],
    params: Any,
    microbatch: Any,
    placement: Placement,
    *,
    state: Any,
    frozen: Any,
    names: Sequence[str] | None,
    recompute: Any,
) -> FunctionModel:
    """Trace and cut a loss function for stages in these places. The arguments are as for `Pipeline.from_function`."""
    params, state, microbatch = _shapes((params, state, microbatch))
    takes_key = _takes_key(loss, state)
    call = _call(loss, state, takes_key=takes_key)
    key = jax.eval_shape(lambda: jax.random.key(0)) if takes_key else None
    program, results = traced(call, params, state, microbatch, key)
    _, aux, _ = results
    whole = WholeTree.of("params", params, {})
    is_frozen = jax.tree.leaves(WholeTree.of("params", params, {"": _parts(params)}).spread("frozen", frozen or False))
    places = Places(program, is_frozen)
    cut = places.cut(len(placement), names)
    if cut is None:
        raise ValueError(f"{len(placement)} stages: too few places")
    division = Division(program, cut.ends)
    held, names_of_stages = _held(division, placement), names_of(division)
    weights = dataclasses.replace(whole, groups=tuple((name, tuple(parts)) for name, parts in held.groups.items()))
    of_state = None
    if state is not None:
        held_by = {f"stage {s}": [Part(k) for k in division.returned(s)[1]] for s in range(len(placement))}
        of_state = WholeTree.of("state", state, {name: parts for name, parts in held_by.items() if parts})
    stages = [
        _stage(division, s, name, placement[s], held, has_state=state is not None, key=takes_key, recompute=recompute)
        for s, name in enumerate(names_of_stages)
    ]
    text = described(division, cut, names_of_stages, placement, whole.paths, held.everywhere)
    return FunctionModel(
        stages=tuple(stages),
        weights=weights,
        state=of_state,
        call=_as_traced(program.closed, jax.tree.structure(results)),
        aux=jax.tree.structure(aux),
        aux_home=tuple(division.aux_home),
        microbatch=microbatch,
        cut=cut,
        described=text,
    )


def _shapes(tree: Any) -> Any:
    def shape(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))

    return jax.tree.map(shape, tree)


def _parts(tree: Any) -> list[Part]:
    return [Part(k) for k in range(len(jax.tree.leaves(tree)))]


def _takes_key(loss: Callable[..., Any], state: Any) -> bool:
    """Return whether a function takes a random key: one required argument more than params, state and micro-batch."""
    others = 2 if state is None else 3
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [p for p in inspect.signature(loss).parameters.values() if p.kind in kinds and p.default is p.empty]
    if len(taken) not in (others, others + 1):
        form = "params, micro_batch" if state is None else "params, state, micro_batch"
        raise ValueError(
            f"loss takes {len(taken)} arguments, {', '.join(p.name for p in taken)}: give a function of ({form}), or of "
            f"({form}, key)" + ("" if state is not None else "; a function with a state needs state=")
        )
    return len(taken) > others


def _call(loss: Callable[..., Any], state: Any, *, takes_key: bool) -> Callable[..., Any]:
    """Return the function as one of `(params, state, micro_batch, key)` that returns `(loss, aux, new state)`."""

    def call(params: Any, state_in: Any, microbatch: Any, key: Any) -> tuple[Any, Any, Any]:
        args = [params, *([] if state is None else [state_in]), microbatch, *([key] if takes_key else [])]
        result = loss(*args)
        results = result if isinstance(result, tuple) else (result,)
        most = 2 if state is None else 3
        if state is None:
            value, aux, new_state = results[0], results[1] if len(results) > 1 else None, None
        else:
            value, aux, new_state = results[0], results[1] if len(results) > 2 else None, results[-1]
        if len(results) > most or (state is not None and len(results) < 2):
            forms = "loss, or (loss, aux)" if state is None else "(loss, new_state), or (loss, aux, new_state)"
            raise ValueError(f"loss returns a tuple of {len(results)}: return {forms}")
        if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ValueError(
                f"loss returns {jnp.result_type(value)}{list(jnp.shape(value))}: return the micro-batch's mean loss, a "
                "float scalar"
            )
        if state is not None:
            of = lambda tree: (
                jax.tree.structure(tree),
                [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)],
            )
            if of(new_state) != of(state):
                raise ValueError(
                    "loss returns a new state that is not like state: return the same tree, shapes and dtypes"
                )
        return value, aux, new_state

    return call


def _as_traced(closed: Any, results: Any) -> Callable[..., Any]:
    """Return a traced function; it is not traced again, since a function may compare the types of its arguments."""
    run = core.jaxpr_as_fun(closed)

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(results, run(*jax.tree.leaves(args)))

    return call


@dataclasses.dataclass
class _Held:
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


def _held(division: Division, placement: Placement) -> _Held:
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
        name = _shared_name(division, part) if part in everywhere else f"stage {lead[stages[0]]}"
        groups.setdefault(name, []).append(part)
    used = {part.leaf for part in users}
    for k in range(len(division.program.params)):
        if k not in used:  # nothing reads it
            groups.setdefault("stage 0", []).append(Part(k))
    own = [f"stage {at}" if f"stage {at}" in groups else None for at in lead]
    shared = [
        tuple(
            dict.fromkeys(_shared_name(division, p) for p in map(division.parts.get, piece.weights) if p in everywhere)
        )
        for piece in division.pieces
    ]
    return _Held(groups, own, shared, everywhere)


def _shared_name(division: Division, part: Part) -> str:
    return f"shared {part.leaf}" if part.rows is None else f"shared {part.leaf} {part.rows[0]}"


def _stage(
    division: Division,
    s: int,
    name: str,
    ipu: int,
    held: _Held,
    *,
    has_state: bool,
    key: bool,
    recompute: Any,
) -> Stage:
    program, piece = division.program, division.pieces[s]
    messages = division.messages()
    received, sent = messages[s - 1] if s else [], messages[s] if s < len(messages) else []
    own = held.groups.get(held.own[s] or "", [])
    at = {part: k for k, part in enumerate(own)}
    of_own = [(at[p], v) for v in piece.weights for p in [division.parts[v]] if p in at]
    of_shared = [
        (name, held.groups[name].index(p), v)
        for v in piece.weights
        for p in [division.parts[v]]
        if p not in at
        for name in held.shared[s]
        if p in held.groups[name]
    ]
    batch = [k for k, v in enumerate(program.batch) if v in piece.inputs]
    aux, new_state = division.returned(s)
    constants = [v for v in program.constants if v in piece.inputs]
    is_random = key and any(v in piece.inputs for v in program.key)
    inputs = [
        *(v for _, v in of_own),
        *(v for *_, v in of_shared),
        *received,
        *(program.batch[k] for k in batch),
        *(program.key if is_random else []),
        *(program.state[k] for k in new_state),
        *constants,
    ]
    results = [program.loss] if s == len(messages) else sent
    outputs = [*results, *(program.new_state[k] for k in new_state), *(program.aux[k] for k in aux)]
    run = core.jaxpr_as_fun(part_of(program.closed, inputs, piece.equations, outputs))
    values = [program.constants[v] for v in constants]
    is_last = s == len(messages)

    def fn(weights: Any, x: Any, microbatch: Any, *, shared: Any = None, state: Any = None, key: Any = None) -> Outputs:
        leaves = jax.tree.leaves(microbatch)
        outs = run(
            *(weights[k] for k, _ in of_own),
            *(shared[name][k] for name, k, _ in of_shared),
            *(_unpacked(v, value) for v, value in zip(received, x or (), strict=True)),
            *(leaves[k] for k in batch),
            *([key] if is_random else []),
            *(state or []),
            *values,
        )
        y, new, of_aux = (
            outs[: len(results)],
            outs[len(results) :][: len(new_state)],
            outs[len(results) + len(new_state) :],
        )
        return Outputs(
            y=y[0] if is_last else tuple(map(_packed, y)),
            state=list(new) if new_state else None,
            aux={str(k): value for k, value in zip(aux, of_aux, strict=True)} or None,
        )

    return Stage(
        fn,
        params=held.own[s],
        ipu=ipu,
        name=name,
        recompute=recompute,
        state=f"stage {s}" if new_state and has_state else None,
        random="same" if is_random else False,
        shared=held.shared[s],
    )


def _packed(value: Any) -> Any:
    """Return a value as it is sent: the data of a random key."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _unpacked(var: Any, value: Any) -> Any:
    dtype = var.aval.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return value
    return jax.random.wrap_key_data(value, impl=dtype._impl.name)
