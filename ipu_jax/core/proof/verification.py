"""Compare a pipeline with the unsharded program of its stages (`reference_value_and_grad`)."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend import core
from jax.extend.core import jaxpr_as_fun

from ipu_jax.base import facts, status
from ipu_jax.base.annotations import Batch, Eqn, Function, Jaxpr, Key, Tree, Value, Var
from ipu_jax.base.checks import check_bool, check_cost
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.jaxprs import CALLS, ClosedJaxpr, closed_of, is_float, variables
from ipu_jax.base.keys import without_keys
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.forward import Forward
from ipu_jax.core.proof.comparison import (
    AllowedError,
    Comparison,
    ForwardReport,
    Results,
    VerificationReport,
    check_same_shapes,
    roundings,
)
from ipu_jax.core.proof.exact import UNFUSED, checked_exact, exact_results, narrow_dtypes
from ipu_jax.core.proof.reference import Compiled, check_pipeline, unsharded_forward, unsharded_update
from ipu_jax.core.step_args import StepArgs

_DEFAULT = 1e-5  # of float32 programs that add in other orders


@overload
def verify(
    pipeline: Pipeline,
    params: Sharded,
    batch: Batch,
    state: Sharded | None = None,
    key: Key = None,
    *,
    rtol: float | None = None,
    exact: bool = False,
) -> VerificationReport: ...
@overload
def verify(
    pipeline: Forward,
    params: Sharded,
    batch: Batch,
    state: Sharded | None = None,
    key: Key = None,
    *,
    rtol: float | None = None,
    exact: bool = False,
) -> ForwardReport: ...
@public_on_mesh
@facts.during("verifying")
def verify(
    pipeline: Pipeline | Forward,
    params: Sharded,
    batch: Batch,
    state: Sharded | None = None,
    key: Key = None,
    *,
    rtol: float | None = None,
    exact: bool = False,
) -> VerificationReport | ForwardReport:
    """Run the pipeline and the unsharded program on the same weights and batch, and compare all their results.

    These are the loss, every gradient, the new state if stages have state, and every leaf of every stage's aux for each
    micro-batch and replica. Floats must agree to a tolerance, everything else exactly. In state and aux, equal
    infinities agree (a masked logit); in loss and gradients they do not.

    Some results are sums of numbers that cancel: the gradient of a bias before a norm, or of the keys' bias in
    attention. They consist only of rounding errors, in the unsharded program and in the pipeline. So if an error is too
    large, the unsharded program runs three times more, with its float weights moved by at most one unit in their last
    place. If the stages compute in half, it also runs once with each operation rounded, since fused operations keep
    float32 between them, and a pipeline is fused differently. Then 4 times the largest change of a leaf in these runs
    is subtracted from its error.

    In bfloat16, float16 or float8 the results of two right programs differ by several percent, so that this comparison
    finds only gross faults. So both programs run once more with float32 in the place of each narrower float, in
    weights, too, and must agree as float32 programs do: a gradient or a reference that is wrong by 1% is found. Custom
    kernels and callbacks keep their dtypes. Whole numbers must be equal in the second comparison alone, since the first
    one's roundings can decide an argmax, or a number rounded to int8. A fault of rounding alone, such as a sum in half
    that should be in float32, is found only in the first comparison, above its tolerance (bfloat16 6%, float16 0.8%).

    Across several instances, all of them must call this, since it communicates: it runs the pipeline, gathers weights,
    gradients and batch, and agrees on the errors. Each instance runs the unsharded program on its own first device, and
    all return the same report, or raise.

    For a forward pass, `pipeline.forward(...)`, it compares all outputs and the new state with the function's.

    With `exact` there is no tolerance: the update is compiled so that XLA rewrites and fuses no operation, and the same
    stages run one after the other on one device. Every bit must be equal; but a pipeline returns -0.0 in aux as 0.0.
    Then the results are compared as above with the unsharded program, if that is not the stages themselves: the
    function, or `reference=`. Under jax 0.10, which compiles half precision without fusion for minutes, XLA still fuses
    there. Where all IPUs compute a stage, or the mesh has further axes, sums over shards have another order than on one
    device, and `exact` is refused.

    Args:
        pipeline: the pipeline, or what its `forward` returned.
        params: from `pipeline.shard`.
        batch, state, key: as for `Pipeline.value_and_grad`, or for a call of `Forward`. They stay usable.
        rtol: the largest relative error allowed in the loss and in each leaf (relative to the leaf's largest
            magnitude), in both comparisons. Default: 1e-5 for float32 programs, and so in the second comparison. In
            the first, the largest of 1e-5 and 8 machine epsilons of the leaf's own dtype, of the coarsest weight dtype
            and of the coarsest dtype that the step computes in.
        exact: whether the pipeline's bits must be equal to the bits of its stages on one device.

    Returns:
        The `VerificationReport` of the last comparison.

    Raises:
        ValueError: `exact` is given for a forward pass, with a stage that all IPUs compute, or with further axes.
        VerificationError: an error is above `rtol` or is NaN, a bit differs under `exact`, or the trees or shapes of
            the aux differ. The message names the worst leaf, the two values that are furthest apart, and the
            tolerance; or the leaves with other bits, and how many. If neither program's result is finite, it names the
            number in batch, weights or state that is not.

    >>> from ipu_jax.core.stage import Stage
    >>> halve = Stage(lambda w, x, mb: mb * w, params="first", ipu=0)
    >>> square = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="second", ipu=1)
    >>> pipeline = Pipeline([halve, square], gradient_accumulation=3)
    >>> params = pipeline.shard({"first": jnp.ones(2), "second": jnp.ones((2, 2))})
    >>> verify(pipeline, params, jnp.ones((3, 4, 2))).loss
    4.0
    """
    is_forward = isinstance(pipeline, Forward)
    if not is_forward:
        check_pipeline(pipeline)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, batch, state, key))):
        raise ValueError("verify was called inside jax.jit or jax.grad, where values are not known: call it outside")
    given = StepArgs(params, batch, state, key)
    pipeline.check(given) if is_forward else pipeline.placement.check(given)
    check_cost("rtol", 0.0 if rtol is None else rtol, "tolerance")
    of_bits = checked_exact(pipeline) if check_bool("exact", exact) else None
    whole_state = None if state is None else pipeline.unshard(state)
    whole = given._replace(params=pipeline.unshard(params), state=whole_state)
    programs = _ForwardPrograms(pipeline, given, whole) if is_forward else _Programs(pipeline, given, whole)
    if of_bits is None:
        actual, expected, traced = programs.sharded(), None, jax.make_jaxpr(programs.program)(*given)
    else:
        actual, expected, traced = exact_results(of_bits, given, whole)
    expected = programs.unsharded() if expected is None else expected
    status.say("comparing")
    dtypes = [jnp.dtype(leaf.dtype) for leaf in pipeline.placement.weights.as_trained(params.layout).trained]
    dtypes = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    allowed = AllowedError(rtol, max([_DEFAULT, *map(roundings, dtypes)]))
    if not is_forward:
        check_same_shapes(actual["aux"], expected["aux"])
    computed = narrow_dtypes(traced)
    comparison = Comparison(pipeline.mesh, actual, expected)
    if comparison.passes(allowed) and not computed:
        return comparison.report
    as_run = AllowedError(rtol, max([allowed.default, *map(roundings, computed)]), np.inf if computed else 0.0)
    if not comparison.passes(as_run) and not comparison.has_nan:
        others = [programs.unsharded(moved=seed) for seed in range(3)]
        others += [programs.unsharded(_rounded)] if computed else []
        comparison = Comparison(pipeline.mesh, actual, expected, others)
    comparison.check(as_run, programs.inputs)
    if computed:
        alike = AllowedError(rtol, _DEFAULT)
        actual, expected = programs.sharded(_in_float32), programs.unsharded(_in_float32)
        comparison = Comparison(pipeline.mesh, actual, expected)
        if not comparison.passes(alike):
            others = [programs.unsharded(functools.partial(_in_float32, seed=seed)) for seed in range(3)]
            comparison = Comparison(pipeline.mesh, actual, expected, others)
        comparison.check(alike, programs.inputs)
    return comparison.report


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The pipeline and the unsharded program, with the arguments of both: `given` and `whole`."""

    pipeline: Any
    given: StepArgs
    whole: StepArgs
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    @property
    def inputs(self) -> Results:
        return {name: getattr(self.whole, name) for name in ("batch", "params", "state")}

    @property
    def program(self) -> Function:
        return self.pipeline.value_and_grad

    def sharded(self, compiled: Compiled = jax.jit) -> Results:
        run = self.program if compiled is jax.jit else compiled(self.program)
        with self._next():
            value, *others = jax.block_until_ready(run(*self.given))
            return _results((value, *map(self.pipeline.unshard, others)))

    def unsharded(self, compiled: Compiled = jax.jit, *, moved: int | None = None) -> Results:
        """Return the unsharded program's results, with weights that are moved by this seed, if one is given."""
        weights = self.whole.params if moved is None else _moved(self.whole.params, moved)
        with self._next():
            return self._unsharded(self.whole._replace(params=weights), compiled)

    def _unsharded(self, whole: StepArgs, compiled: Compiled) -> Results:
        return _results(jax.block_until_ready(unsharded_update(self.pipeline, whole, compiled)))

    def _next(self) -> status.during:
        number = next(self.numbers)
        return status.during(f"program {number} of {max(2, number)}")


class _ForwardPrograms(_Programs):
    """A forward pass, and the function itself."""

    @property
    def program(self) -> Function:
        return self.pipeline.__call__

    def sharded(self, compiled: Compiled = jax.jit) -> Results:
        state = jax.tree.map(jnp.copy, self.given.state)  # a call reuses its buffers
        run = self.program if compiled is jax.jit else compiled(self.program)
        with self._next():
            found = jax.block_until_ready(run(*self.given._replace(state=state)))
        outputs, new_state = found if self.pipeline.has_state else (found, None)
        outputs = jax.tree.map(without_keys, outputs)
        return {"outputs": outputs, "state": new_state and self.pipeline.unshard(new_state)}

    def _unsharded(self, whole: StepArgs, compiled: Compiled) -> Results:
        outputs, new_state = jax.block_until_ready(unsharded_forward(self.pipeline, whole, compiled))
        outputs = jax.tree.map(without_keys, outputs)
        return {"outputs": outputs, "state": new_state if self.pipeline.has_state else None}


def _rounded(program: Function) -> Function:
    """Return a program compiled so that each operation rounds its result to its own dtype."""
    return jax.jit(program, compiler_options=UNFUSED)


def _in_float32(program: Function, *, seed: int | None = None) -> Function:
    """Return a program with float32 in the place of each narrower float, and its inputs moved if a seed is given."""

    def run(*args: Tree) -> Tree:
        with jax.default_matmul_precision("highest"):  # a GPU would round inputs of products to fewer bits
            traced, result = jax.make_jaxpr(program, return_shape=True)(*args)
        wide = in_float32(traced)
        inputs = [jnp.asarray(x, aval.dtype) for x, aval in zip(jax.tree.leaves(args), wide.in_avals, strict=True)]
        inputs = inputs if seed is None else _moved(inputs, seed)
        return jax.tree.unflatten(jax.tree.structure(result), jaxpr_as_fun(wide)(*inputs))

    return jax.jit(run)


def _results(result: tuple[Tree, ...]) -> Results:
    """Return the results of `value_and_grad` by name."""
    value, gradients, *state = result
    loss, aux = value if isinstance(value, tuple) else (value, None)
    return {"loss": loss, "params": gradients, "state": state[0] if state else None, "aux": aux}  # the report's order


@jax.jit
def _moved(values: Tree, seed: int) -> Tree:
    """Return the values with each float32 number moved at random, by at most one unit in its last place."""
    leaves, treedef = jax.tree.flatten(values)

    def move(leaf: Value, key: Key) -> Value:
        # numbers in half are not moved: a change by one unit is not a rounding error, but another weight
        if leaf.dtype not in (np.float32, np.float64):
            return leaf
        eps = jnp.finfo(leaf.dtype).eps
        return leaf * (1 + eps * jax.random.uniform(key, leaf.shape, leaf.dtype, -1, 1))

    return jax.tree.unflatten(treedef, map(move, leaves, jax.random.split(jax.random.key(seed), len(leaves))))


_OPAQUE = ("bitcast_convert_type", "pallas_call", "ffi_call", "pure_callback", "io_callback", "dot_product_attention")
"""How the names of primitives begin whose results depend on the dtypes of their inputs."""


def in_float32(closed: Jaxpr) -> Jaxpr:
    """Return the same program with float32 in the place of each narrower float, but for opaque primitives.

    Constants stay as they were rounded, such as the 0.3 of `jnp.clip(x, 0, 0.3)`. jax rounds them already where it
    inlines a call, and not where the call remains.

    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x.astype("bfloat16")))(jnp.ones(2))
    >>> in_float32(jaxpr).out_avals
    [ShapedArray(float32[2])]
    """
    variables_of: dict[Var, Var] = {}
    constants: dict[Var, Value] = {}  # None for other values

    def wide(part: Any) -> Any:
        if isinstance(part, np.dtype):
            return np.dtype("float32") if jnp.issubdtype(part, jnp.floating) and part.itemsize < 4 else part
        if isinstance(part, core.Literal):
            return type(part)(wide_constant(part.val), wide(part.aval))
        if isinstance(part, core.Var):
            if part not in variables_of:
                variables_of[part] = type(part)(wide(part.aval))
            return variables_of[part]
        if isinstance(part, (ShapedArray, jax.ShapeDtypeStruct)):
            return part.update(dtype=wide(part.dtype))
        if isinstance(part, core.Jaxpr):
            names = ("constvars", "invars", "outvars")
            eqns = [new for eqn in part.eqns for new in equations(eqn)]
            new = part.replace(eqns=eqns, **{name: [*map(wide, getattr(part, name))] for name in names})
            consts = getattr(part, "consts", ())  # since jax 0.12
            return ClosedJaxpr(new, [*map(wide_constant, consts)]) if consts else new
        if hasattr(part, "consts"):
            return ClosedJaxpr(wide(part.jaxpr), [*map(wide_constant, part.consts)])
        return part

    def wide_constant(value: Value) -> Value:
        dtype = jnp.result_type(value)
        return value if wide(dtype) == dtype else np.asarray(value).astype(np.float32)

    def with_constant(eqn: Eqn) -> Eqn:
        name, inputs = (
            eqn.primitive.name,
            [v.val if isinstance(v, core.Literal) else constants.get(v) for v in eqn.invars],
        )
        if name in CALLS and not hasattr(eqn.params[CALLS[name]], "expand"):
            constants.update(zip(closed_of(eqn.params[CALLS[name]]).jaxpr.invars, inputs, strict=True))
        constants.update(dict.fromkeys(eqn.outvars))  # another call of the same body may have had constants
        if name != "convert_element_type" or inputs[0] is None or not is_float(eqn.outvars[0]):
            return eqn
        (out,) = eqn.outvars
        with np.errstate(over="ignore"):
            constants[out] = np.asarray(inputs[0]).astype(out.aval.dtype)
        return eqn.replace(invars=[core.Literal(constants[out], out.aval)])

    def equations(eqn: Eqn) -> list[Eqn]:
        eqn = with_constant(eqn)
        if not eqn.primitive.name.startswith(_OPAQUE):
            changed = {name: [*map(wide, getattr(eqn, name))] for name in ("invars", "outvars")}
            return [eqn.replace(params=jax.tree.map(wide, eqn.params), **changed)]
        read, made = ([v for v in vs if wide(v.aval) != v.aval] for vs in (variables(eqn.invars), eqn.outvars))
        invars = [v if isinstance(v, core.Literal) or v in read else wide(v) for v in eqn.invars]
        kept = eqn.replace(invars=invars, outvars=[v if v in made else wide(v) for v in eqn.outvars])
        return [*(_converted(wide(v), v) for v in read), kept, *(_converted(v, wide(v)) for v in made)]

    return wide(closed)


def _converted(old: Var, new: Var) -> Eqn:
    """Return the equation that converts a variable to another's dtype."""
    (eqn,) = jax.make_jaxpr(lambda x: x.astype(new.aval.dtype))(old.aval).jaxpr.eqns
    return eqn.replace(invars=[old], outvars=[new])
