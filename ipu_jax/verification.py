"""Compare a pipeline with the unsharded program of its stages (`reference_value_and_grad`)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ipu_jax._instances import gathered, on_host
from ipu_jax._tracebacks import ShortTracebacks
from ipu_jax.pipeline import Pipeline
from ipu_jax.processes import beacons
from ipu_jax.processes.beacons import Phase
from ipu_jax.reference import unsharded_update
from ipu_jax.weights.packing import Sharded


class VerificationError(AssertionError):
    """A pipeline's loss, a gradient, its new state or its aux differs from the unsharded program's."""


@dataclasses.dataclass(frozen=True)
class VerificationReport:
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

    def __str__(self) -> str:
        leaf, error = self.worst
        others = {"state": self.state_errors, "aux": self.aux_errors}
        return (
            f"loss {self.loss:.6g}, unsharded {self.reference_loss:.6g}, relative error {self.loss_error:.1e}; "
            f"{len(self.gradient_errors)} gradients, largest relative error {error:.1e} at {leaf}"
            + "".join(
                f"; {len(errors)} of {kind}, {_worst(errors)[1]:.1e}" for kind, errors in others.items() if errors
            )
        )


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: np.inf if np.isnan(item[1]) else item[1])


@beacons.during(Phase.BUSY, "verifying", beacons.LONG)
def verify(
    pipeline: Pipeline,
    params: Sharded,
    batch: Any,
    state: Sharded | None = None,
    key: Any = None,
    *,
    rtol: float | None = None,
) -> VerificationReport:
    """Run the pipeline and the unsharded program on the same weights and batch, and compare all their results.

    These are the loss, every gradient, the new state if stages have state, and every leaf of every stage's aux for each
    micro-batch and replica. Floats must agree to a tolerance, everything else exactly. In state and aux, equal
    infinities agree (a masked logit); in loss and gradients they do not.

    Some results are sums of numbers that cancel: the gradient of a bias before a norm, or of the keys' bias in
    attention. They consist only of rounding errors, in the unsharded program and in the pipeline. So if an error is too
    large, the unsharded program runs three times more, with its float weights moved by at most one unit in their last
    place. If weights are half, it also runs once with each operation rounded, since fused operations keep float32
    between them, and a pipeline is fused differently. Then 4 times the largest change of a leaf in these runs is
    subtracted from its error.

    Across several instances, all of them must call this, since it communicates: it runs the pipeline, gathers weights,
    gradients and batch, and agrees on the errors. Each instance runs the unsharded program on its own first device, and
    all return the same report, or raise.

    Args:
        pipeline: the pipeline.
        params: from `pipeline.shard`.
        batch, state, key: as for `Pipeline.value_and_grad`.
        rtol: the largest relative error allowed in the loss and in each leaf (relative to the leaf's largest
            magnitude). Default: the largest of 1e-5, 8 machine epsilons of the coarsest weight dtype, and 8 of the
            leaf's own dtype.

    Returns:
        The `VerificationReport`.

    Raises:
        VerificationError: an error is above `rtol` or is NaN, or the trees or shapes of the aux differ. The message
            names the worst leaf, the two values that are furthest apart, and the tolerance.

    >>> from ipu_jax.stage import Stage
    >>> halve = Stage(lambda w, x, mb: mb * w, params="first", ipu=0)
    >>> square = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="second", ipu=1)
    >>> pipeline = Pipeline([halve, square], gradient_accumulation=3)
    >>> params = pipeline.shard({"first": jnp.ones(2), "second": jnp.ones((2, 2))})
    >>> verify(pipeline, params, jnp.ones((3, 4, 2))).loss
    4.0
    """
    weights, whole_state = pipeline.unshard(params), None if state is None else pipeline.unshard(state)

    def unsharded(weights: Any, *, fused: bool = True) -> tuple[Any, dict[str, Any]]:
        return _results(unsharded_update(pipeline, weights, batch, whole_state, key, fused=fused))

    with ShortTracebacks():
        value, *sharded = pipeline.value_and_grad(params, batch, state, key)
        loss, actual = _results((value, *map(pipeline.unshard, sharded)))
        expected_loss, expected = unsharded(weights)
    _check_same_shapes(actual["aux"], expected["aux"])
    groups = pipeline.apply_frozen(params).layout.groups
    dtypes = [jnp.dtype(leaf.dtype) for group in groups for leaf in group.leaves if not leaf.frozen]
    allowed = _Allowed(rtol, max([1e-5, *map(_roundings, dtypes)]))
    (compared_loss,) = _compare({"": loss}, {"": expected_loss})[""]
    compared = _compare(actual, expected)
    agreed = functools.partial(_agree, pipeline.mesh, loss, expected_loss, compared_loss)
    loss, expected_loss = agreed(compared)
    if not all(allowed.passes(leaf) for leaves in compared.values() for leaf in leaves):
        moved = [unsharded(_moved(weights, seed))[1] for seed in range(3)]
        if any(leaf.dtype in (jnp.bfloat16, jnp.float16) for leaf in jax.tree.leaves(weights)):
            moved.append(unsharded(weights, fused=False)[1])
        compared = _compare(actual, expected, jax.tree.map(_slack, expected, *moved))
        loss, expected_loss = agreed(compared)
    errors = ({leaf.name: leaf.error for leaf in leaves} for leaves in compared.values())
    report = VerificationReport(loss, expected_loss, compared_loss.error, *errors)
    if not allowed.passes(compared_loss):
        bound = allowed.of(compared_loss)
        raise VerificationError(f"the loss differs from the unsharded program's by more than rtol={bound:g}: {report}")
    for what, leaves, kind in zip(
        ("the gradient of", "the new", "the"),
        compared.values(),
        ("gradients", "leaves of state", "leaves of aux"),
        strict=True,
    ):
        wrong = {leaf.name: leaf for leaf in leaves if not allowed.passes(leaf)}
        if wrong:
            leaf = wrong[_worst({name: leaf.error for name, leaf in wrong.items()})[0]]
            bound = (
                f"more than rtol={allowed.of(leaf):g}" if leaf.is_float else f"and {leaf.actual.dtype} must be equal"
            )
            raise VerificationError(
                f"{what} {leaf.name} differs from the unsharded program's by {leaf.error:.3g} relative, {bound}: "
                f"{leaf.furthest} ({len(wrong)} of {len(leaves)} {kind} differ): {report}"
            )
    return report


class _Compared:
    """A leaf of the pipeline's result, compared with the unsharded program's.

    Attributes:
        name: its name in error messages.
        actual, expected: the leaf from the pipeline and from the unsharded program.
        error: the largest difference, less a slack, relative to the largest finite magnitude in `expected`; once the
            instances have agreed, the largest error of any instance.
        own_error: this instance's error.
    """

    def __init__(self, name: str, actual: Any, expected: Any, slack: float, *, may_be_infinite: bool):
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

    @property
    def furthest(self) -> str:
        """Return the text of an error message for the two elements that are furthest apart, with their position."""
        if self.error > self.own_error:
            return "the values that are furthest apart are on another instance"
        at = np.unravel_index(np.argmax(self._difference), self._difference.shape)
        actual, expected = self.actual[at].item(), self.expected[at].item()
        values = f"{actual:.6g} instead of {expected:.6g}" if self.is_float else f"{actual} instead of {expected}"
        return values + (f" at {list(map(int, at))}" if at else "")


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


def _roundings(dtype: Any) -> float:
    return 8 * float(jnp.finfo(dtype).eps)


def _results(result: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """Return the loss, and the other results of `value_and_grad` by name."""
    value, gradients, *state = result
    loss, aux = value if isinstance(value, tuple) else (value, None)
    return loss, {"params": gradients, "state": state[0] if state else None, "aux": aux}


def _compare(actual: dict[str, Any], expected: dict[str, Any], slack: Any = None) -> dict[str, list[_Compared]]:
    slack = jax.tree.map(lambda _: 0.0, expected) if slack is None else slack
    return {
        name: [
            _Compared(f"{name}{jax.tree_util.keystr(path)}", f, e, s, may_be_infinite=name in ("state", "aux"))
            for (path, f), e, s in zip(
                jax.tree.leaves_with_path(actual[name]),
                jax.tree.leaves(expected[name]),
                jax.tree.leaves(slack[name]),
                strict=True,
            )
        ]
        for name in actual
    }


def _agree(
    mesh: Mesh, loss: Any, expected_loss: Any, compared_loss: _Compared, compared: dict[str, list[_Compared]]
) -> tuple[float, float]:
    """Set each error to the largest of any instance, and return the two losses of the first instance.

    So all instances continue alike, even if a copy of a value is wrong on only one of them.
    """
    leaves = [compared_loss, *(leaf for leaves in compared.values() for leaf in leaves)]
    own = [float(loss), float(expected_loss), *(leaf.own_error for leaf in leaves)]
    of_all = gathered(mesh, own)
    for leaf, error in zip(leaves, of_all[:, 2:].max(0).tolist(), strict=True):
        leaf.error = error
    return float(of_all[0, 0]), float(of_all[0, 1])


def _slack(expected: Any, *moved: Any) -> float:
    """Return 4 times the largest change of a leaf in the moved runs; 0 for integers. Infinities are ignored."""
    if not jnp.issubdtype(jnp.result_type(expected), jnp.inexact):
        return 0.0
    e, largest = _wide(expected), 0.0
    for m in map(_wide, moved):
        both = np.isfinite(e) & np.isfinite(m)
        largest = max(largest, np.abs(m[both] - e[both]).max(initial=0))
    return 4 * largest


def _wide(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64)


def _moved(weights: Any, seed: int) -> Any:
    """Return the weights with each float32 number moved at random, by at most one unit in its last place."""
    rng = np.random.default_rng(seed)

    def move(leaf: Any) -> Any:
        # weights in half are not moved: a change by one unit is not a rounding error, but another weight
        if leaf.dtype not in (np.float32, np.float64):
            return leaf
        return (leaf * (1 + np.finfo(leaf.dtype).eps * rng.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    return jax.tree.map(move, jax.device_get(weights))


def _check_same_shapes(aux: Any, expected: Any) -> None:
    shapes = [jax.tree.map(lambda leaf: list(jnp.shape(leaf)), tree) for tree in (aux, expected)]
    if shapes[0] != shapes[1]:
        raise VerificationError(
            f"the aux has shapes {shapes[0]}, the unsharded program's {shapes[1]}: what a stage's reference returns as "
            "aux must look like what its fn returns"
        )
