"""Compare what two programs return, leaf by leaf, with the errors that rounding explains.

results by name, {"loss": ..., "params": ..., "outputs": ...}  -->  Comparison  -->  a report, or VerificationError
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base.annotations import Dtype, Tree, Value
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.core.mesh.instances import gathered, on_host
from ipu_jax.core.proof.reference import numbers_that

Results = dict[str, Tree]


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


class ComparedLeaf:
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
        for are_bad in (np.isnan, lambda leaf: ~np.isfinite(leaf)):  # an infinity may be a mask
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


class Comparison:
    """Compares all results of the pipeline with the unsharded program's.

    Each error is set to the largest of any instance. So all instances continue alike, even if a copy of a value is
    wrong on only one of them.

    Args:
        mesh: the pipeline's mesh.
        actual, expected: the results of both programs, by name.
        others: results of the unsharded program whose differences from `expected` are rounding errors.

    Attributes:
        leaves: per name, the compared leaves.
        report: the errors.
    """

    def __init__(self, mesh: Mesh, actual: Results, expected: Results, others: Sequence[Tree] = ()):
        slack = jax.tree.map(_slack, expected, *others)
        self.leaves: dict[str, list[ComparedLeaf]] = {name: [] for name in actual}
        of_both = (jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), jax.tree.leaves(slack))
        for ((name, *path), f), e, s in zip(*of_both, strict=True):
            named, is_loose = (
                f"{name.key}{jax.tree_util.keystr(tuple(path))}",
                name.key != "params" and name.key != "loss",
            )
            self.leaves[name.key].append(ComparedLeaf(named, f, e, s, may_be_infinite=is_loose))
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

    def passes(self, allowed: "AllowedError") -> bool:
        return all(allowed.passes(leaf) for leaves in self.leaves.values() for leaf in leaves)

    @property
    def has_nan(self) -> bool:
        """Return whether an error is NaN. Then no slack makes it pass."""
        return any(np.isnan(leaf.error) for leaves in self.leaves.values() for leaf in leaves)

    def check(self, allowed: "AllowedError", inputs: Mapping[str, Tree]) -> None:
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
class AllowedError:
    """The allowed error of a leaf: `rtol` if given, else an error that rounding explains; for integers their own."""

    rtol: float | None
    default: float
    of_integers: float = 0.0

    def of(self, leaf: ComparedLeaf) -> float:
        if not leaf.is_float:
            return self.of_integers
        return max(self.default, roundings(leaf.expected.dtype)) if self.rtol is None else self.rtol

    def passes(self, leaf: ComparedLeaf) -> bool:
        return leaf.error <= self.of(leaf)  # False if it is NaN


def roundings(dtype: Dtype) -> float:
    return 8 * float(jnp.finfo(dtype).eps)


def _slack(expected: Value, *others: Value) -> float:
    """Return 4 times the largest change of a leaf in the other runs; 0 for integers. Infinities are ignored."""
    if not jnp.issubdtype(jnp.result_type(expected), jnp.inexact):
        return 0.0
    e, largest = _wide(expected), 0.0
    for m in map(_wide, others):
        both = np.isfinite(e) & np.isfinite(m)
        largest = max(largest, np.abs(m[both] - e[both]).max(initial=0))
    return 4 * largest


def _wide(leaf: Value) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64)


def check_same_shapes(aux: Tree, expected: Tree) -> None:
    shapes = [jax.tree.map(lambda leaf: list(jnp.shape(leaf)), tree) for tree in (aux, expected)]
    if shapes[0] != shapes[1]:
        raise VerificationError(
            f"the aux has shapes {shapes[0]}, the unsharded program's {shapes[1]}: what a stage's reference returns as "
            "aux must look like what its fn returns"
        )
