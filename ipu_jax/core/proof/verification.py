"""Compare a pipeline with the unsharded program of its stages (`reference_value_and_grad`)."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from ipu_jax.base import facts, status
from ipu_jax.base.annotations import Batch, Dtype, Function, Jaxpr, Key, Tree, Value
from ipu_jax.base.checks import check_cost
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.jaxprs import all_equations
from ipu_jax.base.keys import without_keys
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.axes import further_axes, parts
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.instances import gathered, on_host
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.forward import Forward
from ipu_jax.core.proof.reference import UNFUSED, check_pipeline, numbers_that, unsharded_forward, unsharded_update
from ipu_jax.core.step_args import StepArgs

# Two programs whose operations round alike agree, but for a few numbers that are rounded up in one and down in the
# other. This is more than such numbers change a leaf, and less than a fault of 1%.
_ALIKE = 4e-3
# Without this bound, a single number that is rounded otherwise in a moved run would hide such a fault.
_CANCELS = 0.5
_Results = dict[str, Tree]
_REDUCTIONS = ("psum", "psum2", "psum_invariant", "reduce_scatter")


class VerificationError(AssertionError):
    """A pipeline's loss, gradient, new state or aux differs from the unsharded program's, or is not finite in both."""


@dataclasses.dataclass(frozen=True, repr=False)
class VerificationReport(Shown):
    """The errors that `verify` measured.

    Attributes:
        loss, reference_loss: the losses of the pipeline and of the unsharded program.
        loss_error: their difference, relative to the reference.
        gradient_errors: per leaf, the largest difference relative to the largest magnitude in the reference. If an
            error of any leaf is too large, the part that rounding explains (see `verify`) is subtracted from all
            errors.
        state_errors: the same for the new state, if stages have state.
        aux_errors: the same for the aux, if stages return some.
    """

    loss: float
    reference_loss: float
    loss_error: float
    gradient_errors: dict[str, float]
    state_errors: dict[str, float] = dataclasses.field(default_factory=dict)
    aux_errors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """Return the gradient leaf with the largest relative error, and that error."""
        return _worst(self.gradient_errors) if self.gradient_errors else ("(no weights)", 0.0)

    def _shown(self) -> list[str | Table]:
        leaf, error = self.worst
        others = {"state": self.state_errors, "aux": self.aux_errors}
        line = f"loss {self.loss:.6g}, unsharded {self.reference_loss:.6g}, relative error {self.loss_error:.1e}; "
        line += f"{len(self.gradient_errors)} gradients, largest relative error {error:.1e} at {leaf}"
        rest = [f"; {len(errors)} of {kind}, {_worst(errors)[1]:.1e}" for kind, errors in others.items() if errors]
        return ["".join([line, *rest])]


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: np.inf if np.isnan(item[1]) else item[1])


@dataclasses.dataclass(frozen=True, repr=False)
class ForwardReport(Shown):
    """The errors that `verify` measured in a forward pass, of `Pipeline.forward`.

    Attributes:
        output_errors: per leaf of the outputs, the largest difference relative to the largest magnitude in the
            reference, without the part that rounding explains.
        state_errors: the same for the new state, if the function has a state of its own.
    """

    output_errors: dict[str, float]
    state_errors: dict[str, float] = dataclasses.field(default_factory=dict)

    def _shown(self) -> list[str | Table]:
        leaf, error = _worst(self.output_errors)
        line = f"{counted(len(self.output_errors), 'output')}, largest relative error {error:.1e} at {leaf}"
        state = self.state_errors
        return [line + f"; {len(state)} of state, {_worst(state)[1]:.1e}" if state else line]


@overload
def verify(
    pipeline: Pipeline,
    params: Sharded,
    batch: Batch,
    state: Sharded | None = None,
    key: Key = None,
    *,
    rtol: float | None = None,
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

    In mixed precision, weights are float32 and stages cast them to bfloat16 or float16. Then the results of two right
    programs differ by several percent, so that this comparison finds only gross faults. So both programs run once more
    with each operation rounded. They round alike then, and must agree to 0.4% (float16: 0.1%): a gradient that is wrong
    by 1% is found. Here only leaves that consist of rounding errors have a slack. This is not possible if stages
    compute in float8, or if IPUs add half numbers, as in a concurrent stage with a half input, because each IPU's part
    is rounded: faults below the tolerance of the half dtype are not found then (bfloat16 6%, float16 0.8%). Verify the
    same stages in float32 too. If three or more half gradients of one value are added in another order than in the
    unsharded program, `rtol` has to be larger.

    Across several instances, all of them must call this, since it communicates: it runs the pipeline, gathers weights,
    gradients and batch, and agrees on the errors. Each instance runs the unsharded program on its own first device, and
    all return the same report, or raise.

    Of a forward pass, `pipeline.forward(...)`, all outputs and the new state are compared with those of the function.

    Args:
        pipeline: the pipeline, or what its `forward` returned.
        params: from `pipeline.shard`.
        batch, state, key: as for `Pipeline.value_and_grad`, or for a call of `Forward`. They stay usable.
        rtol: the largest relative error allowed in the loss and in each leaf (relative to the leaf's largest
            magnitude), in both comparisons. Default: the largest of 1e-5, 8 machine epsilons of the coarsest weight
            dtype, and 8 of the leaf's own dtype. In mixed precision also 8 of the coarsest dtype that the step computes
            in the first comparison, and the smaller of 0.004 and one of these in the second.

    Returns:
        The `VerificationReport` of the last comparison.

    Raises:
        VerificationError: an error is above `rtol` or is NaN, or the trees or shapes of the aux differ. The message
            names the worst leaf, the two values that are furthest apart, and the tolerance. If neither program's
            result is finite, it names the number in batch, weights or state that is not.

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
    whole_state = None if state is None else pipeline.unshard(state)
    whole = given._replace(params=pipeline.unshard(params), state=whole_state)
    programs = _ForwardPrograms(pipeline, given, whole) if is_forward else _Programs(pipeline, given, whole)
    actual, expected = programs.sharded(), programs.unsharded()
    status.say("comparing")
    groups = pipeline.placement.groups.as_trained(params.layout).groups
    dtypes = [jnp.dtype(leaf.dtype) for group in groups for leaf in group.leaves if not leaf.frozen]
    dtypes = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    allowed = _Allowed(rtol, max([1e-5, *map(_roundings, dtypes)]))
    if not is_forward:
        _check_same_shapes(actual["aux"], expected["aux"])
    comparison = _Comparison(pipeline.mesh, actual, expected)
    if comparison.passes(allowed):
        return comparison.report
    computed, added = _dtypes_of(jax.make_jaxpr(programs.program)(*given))
    if parts(further_axes(pipeline.mesh)) > 1:
        added = computed  # XLA may add over further axes, and the traced program does not say where
    as_run = _Allowed(rtol, max([allowed.default, *map(_roundings, computed)]))
    if not comparison.passes(as_run) and not comparison.has_nan:
        others = [programs.unsharded(moved=seed) for seed in range(3)]
        others += [programs.unsharded(fused=False)] if computed else []
        comparison = _Comparison(pipeline.mesh, actual, expected, others)
    comparison.check(as_run, programs.inputs)
    if is_forward:
        return comparison.report
    # one number of 8 bits that is rounded otherwise changes a leaf by more than a fault of 1%
    if computed and not added and all(jnp.finfo(dtype).bits == 16 for dtype in computed):
        eps = max(float(jnp.finfo(dtype).eps) for dtype in computed)
        comparison = _compared_as_rounded(programs, _Allowed(rtol, max(allowed.default, min(_ALIKE, eps))))
    return comparison.report


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The pipeline and the unsharded program, with the arguments of both: `given` and `whole`."""

    pipeline: Any
    given: StepArgs
    whole: StepArgs
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    @property
    def inputs(self) -> dict[str, Tree]:
        return {name: getattr(self.whole, name) for name in ("batch", "params", "state")}

    @property
    def program(self) -> Function:
        return self.pipeline.value_and_grad

    def sharded(self, *, fused: bool = True) -> dict[str, Tree]:
        update = self.program
        run = update if fused else jax.jit(update, compiler_options=UNFUSED)
        with self._next():
            value, *others = jax.block_until_ready(run(*self.given))
            return _results((value, *map(self.pipeline.unshard, others)))

    def unsharded(self, *, moved: int | None = None, fused: bool = True) -> dict[str, Tree]:
        """Return the unsharded program's results, with weights that are moved by this seed, if one is given."""
        weights = self.whole.params if moved is None else _moved(self.whole.params, moved)
        whole = self.whole._replace(params=weights)
        with self._next():
            return _results(jax.block_until_ready(unsharded_update(self.pipeline, whole, fused=fused)))

    def _next(self) -> status.during:
        number = next(self.numbers)
        return status.during(f"program {number} of {max(2, number)}")


class _ForwardPrograms(_Programs):
    """A forward pass, and the function itself."""

    @property
    def program(self) -> Function:
        return self.pipeline.__call__

    def sharded(self, *, fused: bool = True) -> dict[str, Tree]:
        state = jax.tree.map(jnp.copy, self.given.state)  # a call reuses its buffers
        with self._next():
            found = jax.block_until_ready(self.pipeline(*self.given._replace(state=state)))
        outputs, new_state = found if self.pipeline.has_state else (found, None)
        outputs = jax.tree.map(without_keys, outputs)
        return {"outputs": outputs, "state": new_state and self.pipeline.unshard(new_state)}

    def unsharded(self, *, moved: int | None = None, fused: bool = True) -> dict[str, Tree]:
        weights = self.whole.params if moved is None else _moved(self.whole.params, moved)
        with self._next():
            run = unsharded_forward(self.pipeline, self.whole._replace(params=weights), fused=fused)
            outputs, new_state = jax.block_until_ready(run)
        outputs = jax.tree.map(without_keys, outputs)
        return {"outputs": outputs, "state": new_state if self.pipeline.has_state else None}


def _compared_as_rounded(programs: _Programs, alike: "_Allowed") -> "_Comparison":
    """Compare both programs with each operation rounded, so that they round alike; raise `VerificationError`."""
    actual, expected = programs.sharded(fused=False), programs.unsharded(fused=False)
    comparison = _Comparison(programs.pipeline.mesh, actual, expected)
    if not comparison.passes(alike):
        others = [programs.unsharded(moved=seed, fused=False) for seed in range(3)]
        comparison = _Comparison(programs.pipeline.mesh, actual, expected, others, least_slack=_CANCELS)
    comparison.check(alike, programs.inputs)
    return comparison


def _dtypes_of(program: Jaxpr) -> tuple[set[Dtype], set[Dtype]]:
    """Return the float dtypes of less than 32 bits that a program computes, and those that it adds over IPUs."""
    computed, added = set(), set()
    for eqn in all_equations(program.jaxpr):
        dtypes = [v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")]
        narrow = {d for d in dtypes if jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits < 32}
        computed |= narrow
        if eqn.primitive.name in _REDUCTIONS and IPU_AXIS in jax.tree.leaves(
            [eqn.params.get("axes", ()), eqn.params.get("axis_name", ())]
        ):
            added |= narrow
    return computed, added


class _Compared:
    """A leaf of the pipeline's result, compared with the unsharded program's.

    Attributes:
        name: its name in error messages.
        actual, expected: the leaf from the pipeline and from the unsharded program.
        error: the largest difference, less a slack, relative to the largest finite magnitude in `expected`; once the
            instances have agreed, the largest error of any instance.
        own_error: this instance's error.
    """

    def __init__(self, name: str, actual: Value, expected: Value, slack: float, *, may_be_infinite: bool):
        self.name, self.actual, self.expected = name, on_host(actual), on_host(expected)
        self.is_float = jnp.issubdtype(self.expected.dtype, jnp.inexact)
        wide_actual, wide_expected = _wide(self.actual), _wide(self.expected)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, and so is refused under any bound
            difference = np.abs(wide_actual - wide_expected)
        if not self.is_float:  # unequal integers that are equal as float64 differ by at least 1
            difference = np.where(self.actual == self.expected, 0, np.maximum(difference, 1))
        elif may_be_infinite:
            difference = np.where(wide_actual == wide_expected, 0, difference)
        self._difference = difference
        scale = np.abs(wide_expected[np.isfinite(wide_expected)]).max(initial=0)
        self.error = float(np.maximum(difference - slack, 0).max() / (scale or 1.0)) if difference.size else 0.0
        self.own_error = self.error
        self._is_finite_alike = np.array_equal(np.isfinite(wide_actual), np.isfinite(wide_expected))

    def check_finite(self, what: str, inputs: Mapping[str, Tree]) -> None:
        """Raise `VerificationError` if both programs have numbers that are not finite, in the same places.

        Then the pipeline is as right as the unsharded program; the message names what makes them so.
        """
        if not np.isnan(self.own_error) or not self._is_finite_alike:
            return
        result = f"{what}{self._at or ''} is {self.expected[*self._at].item()}"
        for are_bad in (np.isnan, _not_finite):  # an infinity may be a mask
            for _, where in numbers_that(are_bad, inputs):
                raise VerificationError(f"{where}, and so {result}, in the unsharded program too: give finite numbers")
        raise VerificationError(
            f"{result}, in the unsharded program too, and all numbers given are finite: the function itself makes it, "
            "and TrainStep.find_nonfinite(state, batch) names the micro-batch and the stage"
        )

    @property
    def furthest(self) -> str:
        """Return the text of an error message for the two elements that are furthest apart, with their position."""
        if self.error > self.own_error:
            return "the values that are furthest apart are on another instance"
        actual, expected = self.actual[*self._at].item(), self.expected[*self._at].item()
        values = f"{actual:.6g} instead of {expected:.6g}" if self.is_float else f"{actual} instead of {expected}"
        return values + (f" at {self._at}" if self._at else "")

    @property
    def _at(self) -> list[int]:
        return [int(k) for k in np.unravel_index(np.argmax(self._difference), self._difference.shape)]


class _Comparison:
    """Compares all results of the pipeline with the unsharded program's.

    Each error is set to the largest of any instance. So all instances continue alike, even if a copy of a value is
    wrong on only one of them.

    Args:
        mesh: the pipeline's mesh.
        actual, expected: the results of both programs, by name.
        others: results of the unsharded program whose differences from `expected` are rounding errors.
        least_slack: the slack of a leaf, relative to its largest magnitude, below which it has none.

    Attributes:
        leaves: per name, the compared leaves.
        report: the errors.
    """

    def __init__(
        self, mesh: Mesh, actual: _Results, expected: _Results, others: Sequence[Tree] = (), *, least_slack: float = 0.0
    ):
        slack = jax.tree.map(functools.partial(_slack, least=least_slack), expected, *others)
        self.leaves: dict[str, list[_Compared]] = {name: [] for name in actual}
        of_both = (jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), jax.tree.leaves(slack))
        for ((name, *path), f), e, s in zip(*of_both, strict=True):
            named, is_loose = (
                f"{name.key}{jax.tree_util.keystr(tuple(path))}",
                name.key != "params" and name.key != "loss",
            )
            self.leaves[name.key].append(_Compared(named, f, e, s, may_be_infinite=is_loose))
        leaves = list(itertools.chain.from_iterable(self.leaves.values()))
        losses = [float(results["loss"]) for results in (actual, expected) if "loss" in results]
        of_all = gathered(mesh, [*losses, *(leaf.own_error for leaf in leaves)])
        for leaf, error in zip(leaves, of_all[:, len(losses) :].max(0).tolist(), strict=True):
            leaf.error = error
        errors = {name: {leaf.name: leaf.error for leaf in leaves} for name, leaves in self.leaves.items()}
        if not losses:
            self.report: Any = ForwardReport(*errors.values())
            return
        (loss_error,) = errors.pop("loss").values()
        self.report = VerificationReport(float(of_all[0, 0]), float(of_all[0, 1]), loss_error, *errors.values())

    def passes(self, allowed: "_Allowed") -> bool:
        return all(allowed.passes(leaf) for leaves in self.leaves.values() for leaf in leaves)

    @property
    def has_nan(self) -> bool:
        """Return whether an error is NaN. Then no slack makes it pass."""
        return any(np.isnan(leaf.error) for leaves in self.leaves.values() for leaf in leaves)

    def check(self, allowed: "_Allowed", inputs: Mapping[str, Tree]) -> None:
        """Raise `VerificationError` unless all leaves pass."""
        loss = next(iter(self.leaves.get("loss", ())), None)
        if loss is not None and not allowed.passes(loss):
            loss.check_finite("the loss", inputs)
            rule = f"by more than rtol={allowed.of(loss):g}"
            raise VerificationError(f"the loss differs from the unsharded program's {rule}: {self.report}")
        for what, name, kind in (
            ("the gradient of", "params", "gradients"),
            ("the new", "state", "leaves of state"),
            ("the", "aux", "leaves of aux"),
            ("the result", "outputs", "outputs"),
        ):
            wrong = {leaf.name: leaf for leaf in self.leaves.get(name, ()) if not allowed.passes(leaf)}
            if wrong:
                leaf = wrong[_worst({name: leaf.error for name, leaf in wrong.items()})[0]]
                leaf.check_finite(f"{what} {leaf.name}", inputs)
                bound = f"more than rtol={allowed.of(leaf):g}"
                bound = bound if leaf.is_float else f"and {leaf.actual.dtype} must be equal"
                raise VerificationError(
                    f"{what} {leaf.name} differs from the unsharded program's by {leaf.error:.3g} relative, {bound}: "
                    f"{leaf.furthest} ({len(wrong)} of {len(self.leaves[name])} {kind} differ): {self.report}"
                )


@dataclasses.dataclass(frozen=True)
class _Allowed:
    """The allowed error of a leaf: `rtol` if given, else an error that rounding explains; 0 for integers."""

    rtol: float | None
    default: float

    def of(self, leaf: _Compared) -> float:
        if not leaf.is_float:
            return 0.0
        return max(self.default, _roundings(leaf.expected.dtype)) if self.rtol is None else self.rtol

    def passes(self, leaf: _Compared) -> bool:
        return leaf.error <= self.of(leaf)  # False if it is NaN


def _not_finite(leaf: Value) -> Value:
    return ~np.isfinite(leaf)


def _roundings(dtype: Dtype) -> float:
    return 8 * float(jnp.finfo(dtype).eps)


def _results(result: tuple[Tree, ...]) -> dict[str, Tree]:
    """Return the results of `value_and_grad` by name."""
    value, gradients, *state = result
    loss, aux = value if isinstance(value, tuple) else (value, None)
    return {"loss": loss, "params": gradients, "state": state[0] if state else None, "aux": aux}  # the report's order


def _slack(expected: Value, *others: Value, least: float) -> float:
    """Return 4 times the largest change of a leaf in the other runs; 0 for integers. Infinities are ignored."""
    if not jnp.issubdtype(jnp.result_type(expected), jnp.inexact):
        return 0.0
    e, largest = _wide(expected), 0.0
    for m in map(_wide, others):
        both = np.isfinite(e) & np.isfinite(m)
        largest = max(largest, np.abs(m[both] - e[both]).max(initial=0))
    scale = np.abs(e[np.isfinite(e)]).max(initial=0)
    return 4 * largest if 4 * largest >= least * scale else 0.0


def _wide(leaf: Value) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64)


def _moved(weights: Tree, seed: int) -> Tree:
    """Return the weights with each float32 number moved at random, by at most one unit in its last place."""
    rng = np.random.default_rng(seed)

    def move(leaf: Value) -> Value:
        # weights in half are not moved: a change by one unit is not a rounding error, but another weight
        if leaf.dtype not in (np.float32, np.float64):
            return leaf
        return (leaf * (1 + np.finfo(leaf.dtype).eps * rng.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    return jax.tree.map(move, jax.device_get(weights))


def _check_same_shapes(aux: Tree, expected: Tree) -> None:
    shapes = [jax.tree.map(lambda leaf: list(jnp.shape(leaf)), tree) for tree in (aux, expected)]
    if shapes[0] != shapes[1]:
        raise VerificationError(
            f"the aux has shapes {shapes[0]}, the unsharded program's {shapes[1]}: what a stage's reference returns as "
            "aux must look like what its fn returns"
        )
