"""Trace like segments once: blocks of one function, by hand or cut from a loop over layers.

Tracing F takes little time, differentiating it takes most. So F is traced as it is, and a segment whose F equals an
earlier one's in text, constants and rules of derivatives gets that one's program.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax

from ipu_jax.base.annotations import Tree
from ipu_jax.core.programs._likeness import Signature, signature_of
from ipu_jax.core.programs.segment import Segment, SegmentResults, call_segment
from ipu_jax.core.programs.segment_program import SegmentProgram, trace_segment


@dataclasses.dataclass
class _Traced:
    """A segment with its arguments, to trace its F if another segment may equal it."""

    segment: Segment
    args: tuple[Tree, ...]
    last: bool

    @functools.cached_property
    def forward(self) -> tuple[Signature | None, SegmentResults]:
        """Return the signature of F as it is, without a derivative, and the shapes of its results."""
        plain = dataclasses.replace(self.segment, backward=False)
        call = lambda params, x, inputs, state: call_segment(plain, params, x, inputs, state, self.last)
        closed, results = jax.make_jaxpr(call, return_shape=True)(*self.args)
        return signature_of((closed,), tuple(closed.out_avals), has_derivatives=self.segment.backward), results


class LikeSegments:
    """Remember the programs of segments."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[_Traced, SegmentProgram]]] = {}

    def trace(
        self,
        segment: Segment,
        args: tuple[Tree, ...],
        *,
        last: bool,
        split: bool,
        trained: Sequence[bool],
        shards: Tree,
    ) -> SegmentProgram:
        """Return what `trace_segment` returns for `(params, x, inputs, state)`; the other arguments are its own."""
        new = _Traced(segment, args, last)
        params, x, inputs, state = args
        # names of groups do not matter, and F is compared only where all else is equal
        leaves, tree = jax.tree.flatten(([*params.values()], x, inputs, [state[name] for name in sorted(state)]))
        shapes = tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves)
        stages = tuple((stage.recompute, stage.place is None, bool(stage.random)) for stage in segment.stages)
        how = (stages, segment.role, segment.stashes, segment.backward, segment.exact, last, split, *trained)
        alike = self._known.setdefault((tree, shapes, how, *jax.tree.leaves(shards)), [])
        for known, program in alike:
            signature, results = new.forward
            if signature is not None and signature == known.forward[0]:
                own = jax.tree.unflatten(jax.tree.structure(results), jax.tree.leaves(program.results))
                return dataclasses.replace(program, results=own)
        program = trace_segment(segment, *args, last=last, split=split, trained=trained, shards=shards)
        alike.append((new, program))
        return program
