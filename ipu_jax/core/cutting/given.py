"""Take what a user gives to `Pipeline.from_function`: the shapes of its trees, and how the function is called.

    loss(params, micro_batch)           loss(params, micro_batch, key)
    loss(params, state, micro_batch)    loss(params, state, micro_batch, key)

What is refused here is refused with the lines to write instead, before anything is cut.
"""

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base import status
from ipu_jax.base.annotations import Batch, Dtype, Function, Jaxpr, Key, Params, Tree, Value
from ipu_jax.base.checks import in_line
from ipu_jax.base.decorators import OTHER_MESH, users_mesh
from ipu_jax.base.jaxprs import all_equations, bodies_of, plain, traced_on, variables
from ipu_jax.core.cutting.cut import STAGE_END
from ipu_jax.core.cutting.everywhere import is_everywhere, traced_for
from ipu_jax.core.cutting.module_trees import check_unchanged, name_of_function
from ipu_jax.core.cutting.trace import FunctionTrace, trace_of
from ipu_jax.core.cutting.users_code import at_line, is_ours, name_of, users_line
from ipu_jax.core.layout.leaf import check_array
from ipu_jax.core.layout.tree_parts import spread
from ipu_jax.core.mesh.axes import further_axes

_NUMBERS: Final = (bool, int, float, complex)
_KEY: Final = re.compile(r"(^|_)(rngs?|prng|keys?|seed|k|r)($|_)")
"""Names that people give to a random key."""
_EXPLICIT: Final = re.compile(r"axis name: (\w+) of type: AxisType.Auto")
_UNBOUND: Final = re.compile(r"unbound axis name: (\w+)")


def shapes(what: str, tree: Tree, *, weak: bool = False) -> Tree:
    """Return the shapes of a tree of arrays, of their shapes, and of Python numbers, as jax would hold them.

    Args:
        what: the name of the tree in error messages.
        tree: the tree.
        weak: whether Python numbers are of weak types, as `jax.grad` takes them.
    """

    def shape_of(path: Any, leaf: Value) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, _NUMBERS):
            return jax.ShapeDtypeStruct((), jnp.result_type(leaf), weak_type=weak)
        check_array(f"{what}{jax.tree_util.keystr(path)}", leaf)
        was_number = weak and isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type
        return jax.ShapeDtypeStruct(jnp.shape(leaf), held_dtype(leaf), weak_type=was_number)

    return jax.tree.map_with_path(shape_of, tree)


def held_dtype(leaf: Value) -> Dtype:
    """Return the dtype in which jax holds an array: NumPy's int64 and float64 become 32 bits wide, by default."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)


def frozen_leaves(frozen: Tree, params: Params) -> list[bool]:
    """Return, per leaf of the weights, whether it is frozen.

    Raises:
        ValueError: `frozen` is not a prefix of `params`, or not of bools.
    """
    if callable(frozen) and jax.tree_util.all_leaves([frozen]):
        raise ValueError(f"frozen={in_line(frozen):.60} is a function: give its bools, frozen=fn(params)")
    found = spread("frozen", False if frozen is None else frozen, jax.tree.structure(params))
    for path, leaf in jax.tree.leaves_with_path(frozen):
        if not isinstance(leaf, (bool, np.bool_)):
            raise ValueError(f"frozen{jax.tree_util.keystr(path)} is {leaf!r:.60}: give True or False")
    return [bool(leaf) for leaf in found]


class NeedsAxesError(ValueError):
    """A function names axes of the mesh of `jax.set_mesh`, in whose context it is cut."""

    def __init__(self, what: str, axes: dict[str, int]):
        self.axes = axes
        named = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        super().__init__(
            f"{what} needs the mesh of jax.set_mesh around the call, {named}, and a pipeline has a mesh of its own: "
            f"give from_function replicas= for copies of the model, or axes={axes} for devices among which XLA splits "
            "arrays, or leave shardings out of the function"
        )


class LossCall:
    """The user's function as one of `(params, state, micro_batch, key)` that returns `(loss, aux, new state)`.

    Args:
        loss: the function.
        state: the shapes of its state, or None.
        frozen: per leaf of the weights, whether it is frozen.
        cast: casts weights and micro-batch first, or None.

    Attributes:
        takes_key: whether it takes a random key: one required argument more than params, state and micro-batch.

    Raises:
        ValueError: it takes other arguments.
    """

    what, batch = "loss", "micro_batch"  # the names of function and micro-batch in error messages

    def __init__(self, loss: Function, state: Tree, frozen: Sequence[bool], cast: Callable[[Tree], Tree] | None = None):
        self._loss, self._state, self._frozen, self._cast = loss, state, frozen, cast
        self.__wrapped__ = loss  # jax names it in its messages
        self._names = _required(loss, state, self.what, self.batch)
        self.takes_key = len(self._names) > (2 if state is None else 3)

    def __call__(self, params: Params, state_in: Tree, microbatch: Batch, key: Key) -> tuple[Value, Tree, Tree]:
        if self._cast is not None:
            params, microbatch = self._cast(params), self._cast(microbatch)
        state, before = self._state, jax.tree.flatten(params)
        args = [params, *([] if state is None else [state_in]), microbatch, *([key] if self.takes_key else [])]
        result = self._loss(*args)
        has_aux = isinstance(result, tuple) and state is None
        check_unchanged(self._loss, params, before, self._frozen, has_aux=has_aux, takes_key=self.takes_key)
        return self._results(result)

    def _results(self, result: Tree) -> tuple[Tree, Tree, Tree]:
        state = self._state
        results = list(result) if isinstance(result, tuple) else [result]
        required = 1 if state is None else 2
        if not required <= len(results) <= required + 1:
            forms = "loss, or (loss, aux)" if state is None else "(loss, new_state), or (loss, aux, new_state)"
            found = f"a tuple of {len(results)}" if isinstance(result, tuple) else "one value"
            raise ValueError(f"loss returns {found}: return {forms}")
        value, new_state = results[0], None if state is None else results[-1]
        if value is None or isinstance(value, (bool, int, str)):
            raise ValueError(f"loss returns {value!r}: return the micro-batch's mean loss, a float scalar")
        aux = results[1] if len(results) > required else None
        self._check_new_state(new_state)
        return value, aux, new_state

    def _check_new_state(self, new_state: Tree) -> None:
        if self._state is not None and _described(new_state) != _described(self._state):
            raise ValueError(
                f"{self.what} returns a new state that is not like state: return the same tree, shapes and dtypes"
            )

    def traced(
        self, params: Params, microbatch: Batch, mesh: Mesh | None, ipus: int
    ) -> tuple[FunctionTrace, Tree, Key]:
        """Return the trace, and the shapes of the results and the key; say what is wrong where calls often fail.

        Calls of an `everywhere` are operations on this number of IPUs.

        Raises:
            ValueError: the function names an unmapped axis, its third argument is not a key, or the first two are
                swapped.
        """
        status.say("tracing the function")
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.takes_key else None
        run = lambda: trace_of(self, params, self._state, microbatch, key, ipus)
        try:
            trace, results = run() if mesh is None else traced_on(mesh, run)
        except Exception as error:
            context = users_mesh.get()
            axes = {} if context is None or mesh is not None else further_axes(context)
            if axes and self._tried(params, microbatch, key, context) is not None:
                raise NeedsAxesError(self.what, axes) from None
            why = self._explained(error, params, microbatch, key)
            if why is None:
                raise
            raise ValueError(why) from error
        read = {id(v) for eqn in trace.closed.jaxpr.eqns for v in eqn.invars}
        if self._may_be_no_key and not any(id(v) in read for v in trace.key):
            name = self._names[-1]
            raise ValueError(f"{self.what} takes {name!r}, gets a random key there, and ignores it{self._one_batch()}")
        status.say("cutting the function")
        return trace, results, key

    def on_one_ipu(self, params: Params, microbatch: Batch, key: Key) -> Jaxpr:
        """Return the closed jaxpr of the function on one IPU, which computes every `everywhere` on whole arrays."""
        return plain(traced_for(1, self, params, self._state, microbatch, key)[0])

    def _explained(self, error: Exception, params: Params, microbatch: Batch, key: Key) -> str | None:
        axis = _UNBOUND.search(str(error))
        if axis is not None:
            return (
                f"{self.what} names the axis {axis[1]!r}{users_line(error)}, which nothing maps here: "
                "from_function takes the mean over micro-batches and replicas: leave pmean and axis_name out, or map "
                f"the axis in the function, jax.vmap(..., axis_name={axis[1]!r})"
            )
        axis = _EXPLICIT.search(str(error))
        if axis is not None:
            return (
                f"{self.what} needs {axis[1]!r} as an Explicit axis{users_line(error)}, and the axes of a pipeline are "
                f"Auto: give jax.lax.with_sharding_constraint(x, P({axis[1]!r})) in place of out_sharding=, or P()"
            )
        if is_ours(error):
            return None
        if self._may_be_no_key:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.90}"
            where = f"a random key as {self._names[-1]!r}, its last argument"
            return f"{self.what} failed with {where} ({why}){self._one_batch()}"
        if self._state is None and getattr(self._tried(microbatch, params, key), "shape", None) == ():
            return "params and micro_batch are swapped: give from_function(loss, params, micro_batch, ...)"
        return None

    @property
    def _may_be_no_key(self) -> bool:
        return self.takes_key and _KEY.search(self._names[-1]) is None

    def _one_batch(self) -> str:
        *others, first, last = self._names
        call = ", ".join([*others, f"{self.batch}[0]", f"{self.batch}[1]"])
        with_state = "" if self._state is not None else f"; if {first} is a state, give state="
        return (
            f": a batch is one argument, so give lambda {', '.join([*others, self.batch])}: "
            f"{name_of_function(self._loss)}({call}), with ({first}, {last}) as {self.batch}{with_state}"
        )

    def _tried(self, params: Params, microbatch: Batch, key: Key, mesh: Any = None) -> Tree:
        """Return the shapes of the outputs, traced in the context of a mesh; None if it cannot be traced."""
        with contextlib.suppress(Exception), jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            return jax.eval_shape(self, params, self._state, microbatch, key)[0]
        return None


class ForwardCall(LossCall):
    """A function of the weights for `Pipeline.forward`: `(params, state, inputs, key)` -> `(outputs, None, new state)`.

    Args:
        replaces_state: whether it returns `(outputs, new state)`; otherwise it only reads the state, if it gets one.
    """

    what, batch = "fn", "inputs"

    def __init__(self, *args: Any, replaces_state: bool):
        super().__init__(*args)
        self._replaces_state = replaces_state

    def _results(self, result: Tree) -> tuple[Tree, Tree, Tree]:
        if not self._replaces_state:
            return result, None, None
        if not isinstance(result, tuple) or len(result) != 2:
            found = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
            raise ValueError(f"fn returns {found}: with state=, return (outputs, new_state)")
        self._check_new_state(result[1])
        return result[0], None, result[1]


def _required(loss: Function, state: Tree, what: str, batch: str) -> list[str]:
    """Return the names of the arguments with which a function is called; for *args, the usual names.

    Raises:
        ValueError: they are not params, perhaps state, a micro-batch and perhaps a key.
    """
    forms = ["params", *(["state"] if state is not None else []), batch]
    name, call = name_of_function(loss), ", ".join(forms)
    if (loss.__doc__ or "").startswith("Value and gradient of "):  # as jax writes it
        raise ValueError(f"{what} is a jax.value_and_grad({name}): give {name}, whose gradients the pipeline computes")
    try:
        taken = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(f"{in_line(loss)} does not say what it takes: give lambda {call}: {name}({call})") from None
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    needed = [p for p in taken if p.default is p.empty]
    names = [p.name for p in needed if p.kind in kinds]
    by_name = [p.name for p in needed if p.kind == p.KEYWORD_ONLY]
    takes_more = any(p.kind == p.VAR_POSITIONAL for p in taken)
    at = next((k for k, each in enumerate(names) if k > 0 and _KEY.search(each)), None)
    has_key = len(names) == len(forms) + 1 and _KEY.search(names[-1]) is not None
    if at is not None and at < len(forms) and not has_key and (takes_more or len(names) > len(forms)):  # haiku's apply
        own = [*forms[:at], "key", *forms[at:]]
        raise ValueError(
            f"{what} takes {names[at]!r} as argument {at + 1}, and gets the key last: give "
            f"lambda {call}, key: {name}({', '.join(own)})"
        )
    if by_name:
        keys = ", ".join(f"{each}={'key' if _KEY.search(each) else '...'}" for each in by_name)
        raise ValueError(
            f"{what} takes {', '.join(by_name)} by name only: give lambda {call}, key: {name}({call}, {keys})"
        )
    if len(names) < len(forms) and takes_more:
        return forms
    if len(names) not in (len(forms), len(forms) + 1):
        takes = f"{len(names)} arguments" + f", {', '.join(names)}" * bool(names)
        raise ValueError(
            f"{what} takes {takes}: give a function of ({call}), or of ({call}, key)"
            + ("" if state is not None else "; a function with a state needs state=")
        )
    return names


def _described(tree: Tree) -> Tree:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def check_loss(trace: FunctionTrace, loss: Value) -> None:
    """Raise `ValueError` unless the function returns a float scalar."""
    found = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        made = trace.made_by.get(trace.outputs[0])
        where = "" if made is None else at_line(made)
        raise ValueError(f"loss returns {found}{where}: return the micro-batch's mean loss, a float scalar")


def check_constants(trace: FunctionTrace) -> None:
    """Raise `ValueError` if the function closes over an array that is on a mesh of its own."""
    for value in (*trace.closed.consts, *trace.constants.values()):
        mesh = getattr(getattr(value, "sharding", None), "mesh", None)
        if mesh is not None and mesh.size > 1:
            found = f"{value.dtype}{list(value.shape)} on the mesh {dict(mesh.shape)}"
            raise ValueError(OTHER_MESH.format(found))


def warn_of_constant_keys(trace: FunctionTrace) -> None:
    """Warn if the function draws random numbers from a key that is not an argument."""
    kind = lambda operation: getattr(getattr(operation, "primitive", None), "name", None)
    # bits that only make another key, as in fold_in(key, bits(own)), are no draw
    read = [op.invars for op in trace.operations if kind(op) != "random_fold_in"]
    drawn = {v for atoms in [*read, trace.results] for v in variables(atoms)}
    for operation in trace.operations:
        is_random = kind(operation) == "random_bits" and not drawn.isdisjoint(operation.outvars)
        if is_random and all(v in trace.of_constants for v in variables(operation.invars)):
            warnings.warn(
                f"the function draws random numbers{at_line(operation)} from a key that is not an argument: all "
                "micro-batches and updates get the same. Take a key, loss(params, micro_batch, key), and draw with it; "
                "for NNX, nnx.reseed(module, **{stream: key}), with the name of each of its streams",
                stacklevel=2,
            )
            return


def check_marks(trace: FunctionTrace, names: Sequence[str]) -> None:
    """Raise `ValueError` for a mark inside an operation with a body, where a function is not cut."""
    for operation in {id(getattr(op, "scan", op)): op for op in trace.operations}.values():
        scan = getattr(operation, "scan", None)
        mend = "leave it out, since a scan over weights is cut between its layers" if scan else "mark its result"
        for eqn in (eqn for body in bodies_of(scan or operation) for eqn in all_equations(plain(body))):
            name = eqn.params["name"] if eqn.primitive.name == "name" else None
            if name in names:
                mark = STAGE_END if name == STAGE_END else f"the name {name!r} of cuts="
                raise ValueError(
                    f"{mark}{at_line(eqn)} is inside one operation, {name_of(operation)}{at_line(operation)}, and a "
                    f"function is cut between operations: {mend}, or write a Python loop"
                )


def check_effects(trace: FunctionTrace) -> None:
    """Raise `ValueError` for effects that have an order, which the stages of several IPUs do not keep."""
    for operation in trace.operations:
        inside = operation.params["jaxpr"].effects if is_everywhere(operation) else ()
        names = [type(effect).__name__ for effect in (*operation.effects, *inside)]
        if any("Ordered" in name and "Unordered" not in name for name in names):
            raise ValueError(
                f"the function has an ordered effect, {name_of(operation)}{at_line(operation)}: micro-batches run on "
                "several IPUs at once, in no order; give the callback ordered=False, or leave it out"
            )
