"""Compare a pipeline's weight update with its stages' on one device, bit by bit.

Both programs compute the same operations. Their bits are equal if XLA rewrites and fuses none of them, and if both add
in one order. The order is the pipeline's:

- a stage adds up the cotangents of each of its parts, and each gradient as a whole (`Segment.exact`);
- a weight that several stages read gets one sum per IPU, in the order in which the schedule runs B or W there. Then
  the sums of the IPUs are added, and at last the sums of the replicas.
"""

import collections
import dataclasses
import functools
import itertools
import operator
import os
import re
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base import status
from ipu_jax.base.annotations import Dtype, Jaxpr, Json, Tree, Value
from ipu_jax.base.jaxprs import all_equations
from ipu_jax.base.showing import counted
from ipu_jax.core.layout.layout import Group, PackedLayout
from ipu_jax.core.layout.tree_parts import joined
from ipu_jax.core.mesh.axes import further_axes, parts
from ipu_jax.core.mesh.instances import gathered
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.programs.segment import NO_MESSAGE, Message, MicrobatchInputs, merged_aux, segments_of
from ipu_jax.core.proof.comparison import ComparedLeaf, Comparison, Results, VerificationError
from ipu_jax.core.proof.reference import Learning, differentiated
from ipu_jax.core.step_args import StepArgs, without_dims

UNFUSED: Final[dict[str, Json]] = {"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
"""Every operation rounds its result to its own dtype. A library of XLA's CPU backend fuses a product with its
neighbours, and rounds otherwise than XLA does."""

_PASSES: Final = "xla_disable_hlo_passes"


def exact_options(*, optimized: bool, half: bool = False) -> dict[str, Json]:
    """Return compiler options with which no operation is rewritten, so that each is computed alike in every program.

    XLA rewrites operations that meet in one program: a / sqrt(b) becomes a * rsqrt(b), but not where sqrt(b) was
    stashed. In a pipeline other operations meet than on one device.

    Args:
        optimized: whether XLA may compute several operations in one loop, and optimize its code. A CPU may then round
            a product and a sum once (FMA) if both are in one loop, and twice in another program.
        half: whether the program computes in less than float32. Without such loops jax 0.10 compiles it for minutes, so
            that it may have them.

    Passes that `XLA_FLAGS` disables stay disabled.

    >>> exact_options(optimized=True)["xla_disable_hlo_passes"]
    'algsimp'
    """
    given = re.findall(rf"--{_PASSES}=(\S*)", os.environ.get("XLA_FLAGS", ""))
    fuses = optimized or (half and jax.__version_info__ < (0, 11))
    passes = [*filter(None, ",".join(given).split(",")), "algsimp", *([] if fuses else ["fusion"])]
    level: dict[str, Json] = {} if optimized else {"xla_backend_optimization_level": 0}
    return {**UNFUSED, _PASSES: ",".join(dict.fromkeys(passes)), **level}


def checked_exact(pipeline: Any) -> Pipeline:
    """Return the pipeline, or raise `ValueError` if it cannot be compared bit by bit."""
    if not isinstance(pipeline, Pipeline):
        raise ValueError("exact=True compares weight updates, and a forward pass makes none: leave exact out")
    instead = "leave exact out, and verify holds it to 1e-05"
    for stage in pipeline.stages:
        if stage.place is None:
            raise ValueError(
                f"exact=True, but all IPUs compute stage {stage.name!r}, and add the sums over their shards in another "
                f"order than one device: {instead}"
            )
    if parts(further_axes(pipeline.mesh)) > 1:
        axes = ", ".join(further_axes(pipeline.mesh))
        raise ValueError(f"exact=True, but XLA adds over the mesh's axes {axes} in an order of its own: {instead}")
    return pipeline


def exact_results(pipeline: Pipeline, given: StepArgs, whole: StepArgs) -> tuple[Results, Results | None, Jaxpr]:
    """Return the results of the pipeline, after comparing all their bits with its stages' on one device.

    Args:
        pipeline: the pipeline, from `checked_exact`.
        given: its arguments.
        whole: the same with whole weights and state.

    Returns:
        The results of the pipeline; the results of the stages, or None if the unsharded program is a function or a
        `reference`; and the traced update.

    Raises:
        VerificationError: a bit differs. The message names the leaves, and says how many bits differ.
    """
    placed = dataclasses.replace(pipeline.placement.scheduled(given), exact=True)
    reduction = pipeline.options.reduction

    @jax.jit
    def update(*args: Tree) -> Tree:
        results = placed.run(StepArgs(*args), role="training", backward=True, reduction=reduction)
        return placed.loss_with_aux(results.loss, results.aux), results.gradients, results.state

    traced = jax.make_jaxpr(update)(*given)
    options = exact_options(optimized=False, half=bool(narrow_dtypes(traced)))
    run = jax.jit(lambda *args: update(*args), compiler_options=options)
    with status.during("program 1 of 2"):
        value, gradients, state = jax.block_until_ready(run(*given))
    new_state = None if given.state is None else pipeline.unshard(state)
    actual = _results(value, pipeline.unshard(gradients), new_state)
    with status.during("program 2 of 2"):
        expected = _OnOneDevice(pipeline, given, whole).results(options)
    _check_bits(Comparison(pipeline.mesh, actual, expected), pipeline.mesh)
    is_other = pipeline.function is not None or any(stage.reference for stage in pipeline.stages)
    return actual, None if is_other else expected, traced


def narrow_dtypes(program: Jaxpr) -> set[Dtype]:
    """Return the float dtypes of less than 32 bits that a program computes."""
    dtypes = {v.aval.dtype for eqn in all_equations(program.jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")}
    return {d for d in dtypes if jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits < 32}


def _results(value: Tree, gradients: Tree, state: Tree) -> Results:
    loss, aux = value if isinstance(value, tuple) else (value, None)
    aux = jax.tree.map(lambda leaf: jnp.where(leaf == 0, jnp.zeros_like(leaf), leaf), aux)  # a broadcast loses -0.0
    return {"loss": loss, "params": gradients, "state": state, "aux": aux}


def _check_bits(comparison: Comparison, mesh: Mesh) -> None:
    leaves = [*itertools.chain.from_iterable(comparison.leaves.values())]
    bits = gathered(mesh, [*map(_differing_bits, leaves)]).max(0).astype(int).tolist()
    differ = [f"{leaf.name} in {counted(n, 'bit')}" for leaf, n in zip(leaves, bits, strict=True) if n]
    if differ:
        more = f" and {len(differ) - 8} more" * (len(differ) > 8)
        raise VerificationError(
            f"{len(differ)} of {counted(len(leaves), 'result')} differ from the stages on one device: "
            f"{', '.join(differ[:8])}{more}: {comparison.report}"
        )


def _differing_bits(leaf: ComparedLeaf) -> int:
    one, other = (np.frombuffer(array.tobytes(), np.uint8) for array in (leaf.actual, leaf.expected))
    return int(np.bitwise_count(one ^ other).sum())


class _OnOneDevice:
    """Run the segments of a pipeline one after the other, and differentiate all of them at once."""

    def __init__(self, pipeline: Pipeline, given: StepArgs, whole: StepArgs):
        self.pipeline, self.whole = pipeline, whole
        self.placed = placed = pipeline.placement.scheduled(given)
        assert placed.schedule is not None, "it is chosen for the arguments"
        self.schedule = placed.schedule
        self.segments = segments_of(placed.stages, placed.schedule, prices=placed.prices, exact=True)
        self.layout = placed.weights.as_trained(given.params.layout)
        self.has_state = given.state is not None
        self.state_layout = given.state.layout if self.has_state else PackedLayout()
        self.readers = collections.defaultdict[str, dict[int, list[int]]](dict)  # per group and IPU, its segments
        for number, segment in enumerate(self.segments):
            for name in segment.groups:
                self.readers[name].setdefault(segment.place or 0, []).append(number)

    def results(self, options: dict[str, Json]) -> Results:
        """Return the results, compiled with these options."""
        compiled = functools.partial(jax.jit, compiler_options=options)
        of_replicas = differentiated(self.pipeline, self.whole, self.learning_of, self.call, compiled)
        gradients, states, losses, aux = of_replicas
        added = lambda rows, start: sum(rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), start)
        mean = compiled(lambda rows, start: added(rows, start) / len(rows))  # without these options, it is * (1 / 3)
        loss = mean(mean(losses.T, 0.0), -0.0)  # a pipeline adds losses to 0.0, so -0.0 is lost
        value = self.placed.loss_with_aux(loss, without_dims(aux, self.pipeline.replicas))
        reduced = lambda s: mean(s, -0.0).astype(s.dtype) if jnp.issubdtype(s.dtype, jnp.floating) else s[0]
        new_state = jax.tree.map(reduced, states) if self.has_state else None
        of_groups = {group.name: self._gradients(group, gradients) for group in self.layout.groups}
        return _results(value, joined(self.layout.join(of_groups)), new_state)

    def learning_of(self, args: StepArgs) -> Learning:
        """Return the trained leaves that each segment reads; stacked where another one of its IPU reads them, too."""
        groups, found = self.layout.split(args.params), Learning({}, {})
        for name, of_ipus in self.readers.items():
            both = zip(jax.tree.leaves(groups[name]), self.layout.group(name).leaves, strict=True)
            trained = [value for value, leaf in both if not leaf.frozen]
            for numbers in of_ipus.values():
                kind = found.summed if len(numbers) == 1 else found.stacked
                kind.update({(name, number): trained for number in numbers})
        return found

    def call(
        self, learning: Learning, args: StepArgs, inputs: MicrobatchInputs, state: Tree
    ) -> tuple[Message, Tree, Tree]:
        """Run the segments, as `differentiated` calls a model."""
        groups, trained = self.layout.split(args.params), {**learning.summed, **learning.stacked}
        x, aux, new_state = NO_MESSAGE, dict[str, Tree](), self.state_layout.split(state)
        for number, segment in enumerate(self.segments):
            weights: dict[str, Tree] = {}
            for name in segment.groups:
                group, following = self.layout.group(name), iter(trained[name, number])
                both = zip(jax.tree.leaves(groups[name]), group.leaves, strict=True)
                leaves = [value if leaf.frozen else next(following) for value, leaf in both]
                weights[name] = jax.tree.unflatten(group.treedef, leaves)
            keys = inputs.keys[segment.first : segment.first + len(segment.stages)]
            x, new_state, of_segment = segment(weights, x, MicrobatchInputs(inputs.microbatch, keys), new_state)
            aux = merged_aux(aux, of_segment)
        return x, joined(self.state_layout.join(new_state)), aux

    def _gradients(self, group: Group, gradients: Learning) -> list[Value]:
        """Return a group's gradients: added over micro-batches, over IPUs, and over replicas."""
        of_ipus = [
            gradients.summed[group.name, numbers[0]] if len(numbers) == 1 else self._in_order(group, numbers, gradients)
            for _, numbers in sorted(self.readers[group.name].items())
        ]
        added = iter([_added(_added(of_leaf)) for of_leaf in zip(*of_ipus, strict=True)])
        is_zero = lambda leaf: leaf.frozen or not of_ipus
        return [(jnp.zeros(g.shape) if is_zero(g) else next(added)).astype(g.dtype) for g in group.leaves]

    def _in_order(self, group: Group, numbers: list[int], gradients: Learning) -> list[Value]:
        """Return the sums of the gradients of several segments of one IPU, in the order in which they run."""
        ticks = self.schedule.weight or self.schedule.backward
        # within a tick, an IPU runs its last segment first
        when = [(tick, -n, m) for n in numbers for m, tick in enumerate(ticks[self.segments[n].first])]
        terms = ([leaf[:, m] for leaf in gradients.stacked[group.name, -n]] for _, n, m in sorted(when))
        return [sum(of_leaf) for of_leaf in zip(*terms, strict=True)]  # from 0.0, as in a pipeline: -0.0 is lost


def _added(terms: Iterable[Value]) -> Value:
    return functools.reduce(operator.add, terms)
