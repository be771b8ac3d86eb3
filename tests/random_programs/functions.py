"""Test that a loss function stays the same when it is cut into stages: random functions (`sources.py`).

The stages run one after the other in plain jax on one device, and loss, gradients, aux and new state must be the same
as from the function itself. Now and then a pipeline of two IPUs runs it as well, and stages that hold what these hold
run micro-batches of more rows: cut at the same places, or along the weights.

The stages' equations are tested, not what XLA makes of them. So programs are compiled without optimisation.
"""

from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import numpy as np

from ipu_jax import Pipeline
from ipu_jax.core.cutting import function
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.cutting.holders import cut_alike, cut_along
from random_programs.dice import Dice
from random_programs.pipelines import bubbles_of_nan
from random_programs.sources import SCOPE, Source
from support.composed import composed, cut_into

MICRO_BATCHES = 3
FAST: Any = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    FAST["xla_cpu_use_fusion_emitters"] = False  # jaxlib 0.12 does not know it any more
EXACT, COARSE = 1e-5, 2e-2
"""Allowed errors, as parts of a leaf's largest value; gradients that are rounded to bfloat16 on the way are COARSE."""
FLOOR = 1e-3
"""A leaf's largest value is at least this part of the largest value of its tree."""


class Case:
    """A case of one function, and the numbers of stages into which it is cut."""

    def __init__(self, dice: Dice):
        self.source = Source(dice)
        self.stages = dice.shuffled(range(1, 7))[: dice.weighted({1: 2, 2: 1})]
        self.schedule = dice.one_of(("grouped", "1f1b", "zb-h1", "sequential")) if dice.chance(0.1) else ""
        self.key = jax.random.key(dice.number()) if "key" in self.source.args else None
        self.of_more_rows = dice.one_of((cut_alike, cut_along)) if dice.chance(0.3) else None

    def __str__(self) -> str:
        source, shape_of = self.source, lambda leaf: f"{np.shape(leaf)}"
        trees = {"params": source.params, "state": source.state, "batch": source.batch}
        shapes = [f"{name}: {jax.tree.map(shape_of, tree)}" for name, tree in trees.items()]
        about = f"stages={self.stages} schedule={self.schedule!r} coarse={sorted(source.coarse)}"
        return "\n".join([about, *shapes, *source.lines])

    def check(self) -> None:
        """Compare the stages, one after the other, and perhaps a pipeline, with the function."""
        source, scope = self.source, dict(SCOPE)
        exec("\n".join(source.lines), scope)
        self.loss: Any = scope["loss"]
        differentiated = jax.value_and_grad(self._whole, has_aux=True)
        self.exact = jax.jit(differentiated, compiler_options=FAST)
        for stages in self.stages:
            model = self._cut(stages)
            self._check_stages(model, source.batch)
            if self.of_more_rows is not None:
                batch = jax.tree.map(_with_more_rows, source.batch)
                self._check_stages(self._resized(model, batch), batch)
        if self.schedule:
            self._check_pipeline()

    def _check_stages(self, model: FunctionModel, batch: Any) -> None:
        given = (self.source.params, self.source.state, batch, self.key)
        exact = self.exact(*given)
        run = jax.value_and_grad(composed(model), has_aux=True)
        (loss, (aux, state)), gradients = jax.jit(run, compiler_options=FAST)(*given)
        of_groups = {} if model.state is None else model.state.split(exact[0][1][1])  # each copy of a leaf
        expected = ((exact[0][0], (exact[0][1][0], of_groups)), exact[1])
        self._compare(f"{len(model.stages)} stages: ", ((loss, (aux, state)), gradients), expected)

    def _resized(self, model: FunctionModel, batch: Any) -> FunctionModel:
        """Return stages that hold what these hold for another micro-batch."""
        along = lambda trace, holders, like, cut, state: cut_along(trace, holders, state)
        with mock.patch.object(function, "cut_alike", cut_alike if self.of_more_rows is cut_alike else along):
            return model.of_microbatch(batch, 0)

    def _whole(self, params: Any, state: Any, batch: Any, key: Any) -> Any:
        """Return `(loss, (aux, new state))` of the function itself."""
        of_args = {"params": params, "state": state, "batch": batch, "key": key}
        result = self.loss(*(of_args[name] for name in self.source.args))
        loss, *others = result if isinstance(result, tuple) else (result,)
        return loss, (others[0] if self.source.has_aux else None, others[-1] if "state" in self.source.args else {})

    def _cut(self, stages: int) -> FunctionModel:
        """Return the function as this number of stages, or as fewer if it has too few places."""
        source = self.source
        state = source.state if "state" in source.args else None
        try:
            return cut_into(stages, self.loss, source.params, source.batch, state=state)
        except ValueError as error:
            if stages == 1 or "more than the function can be cut into" not in str(error):
                raise
            return self._cut(stages - 1)

    def _check_pipeline(self) -> None:
        """Compare a pipeline of two IPUs with the function, called for one micro-batch after the other."""
        source, state = self.source, self.source.state
        batches = [jax.tree.map(lambda leaf, m=m: _moved(leaf, m), source.batch) for m in range(MICRO_BATCHES)]
        results = []
        for m, batch in enumerate(batches):
            key = None if self.key is None else jax.random.fold_in(jax.random.fold_in(self.key, 0), m)
            results.append(self.exact(source.params, state, batch, key))
            state = results[-1][0][1][1]
        mean = lambda *leaves: sum(leaves) / MICRO_BATCHES
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *((loss, aux) for (loss, (aux, _)), _ in results))
        expected = ((stacked[0].mean(), (stacked[1], state)), jax.tree.map(mean, *(g for _, g in results)))
        how: dict[str, Any] = {"state": source.state if "state" in source.args else None}
        pipeline = Pipeline.from_function(
            *(self.loss, source.params, source.batch),
            ipus=2,
            schedule=self.schedule,
            gradient_accumulation=MICRO_BATCHES,
            **how,
        )
        of_stages = pipeline.shard_state(source.state) if how["state"] is not None else None
        key = self.key if any(stage.random for stage in pipeline.stages) else None  # nothing may use the key
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
        run = jax.jit(pipeline.value_and_grad, compiler_options=FAST)
        with bubbles_of_nan():
            value, gradients, *new = run(pipeline.shard(source.params), batch, of_stages, key)
        loss, aux = value if source.has_aux else (value, None)
        found = ((loss, (aux, pipeline.unshard(new[0]) if new else {})), pipeline.unshard(gradients))
        self._compare(f"schedule {self.schedule}: ", found, expected)

    def _compare(self, where: str, found: Any, expected: Any) -> None:
        results = []
        for (loss, (aux, state)), gradients in (found, expected):
            results.append({"loss": loss, "aux": aux, "state": state, "gradients": gradients})
        for name, e in results[1].items():
            assert_near(where + name, results[0][name], e, self.source.coarse if name == "gradients" else set())


def assert_near(what: str, found: Any, expected: Any, coarse: set[str]) -> None:
    """Raise `AssertionError` with every leaf of `found` that differs from `expected`; `coarse` names rounded leaves."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), f"{what}: {found} is not like {expected}"
    largest = max((np.abs(np.float64(leaf)).max(initial=0) for leaf in jax.tree.leaves(expected)), default=0.0)
    wrong = []
    for (path, f), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = f"{what}{jax.tree_util.keystr(path)}"
        if (f.shape, f.dtype) != (e.shape, e.dtype):
            wrong.append(f"{name} is {f.dtype}{f.shape}, and should be {e.dtype}{e.shape}")
            continue
        off, most = (np.abs(leaf).max(initial=0) for leaf in (np.float64(f) - np.float64(e), np.float64(e)))
        scale = max(most, FLOOR * largest)
        if not off <= (COARSE if jax.tree_util.keystr(path[:1], simple=True) in coarse else EXACT) * scale:
            wrong.append(f"{name} of shape {e.shape} is off by {off:.3g} of {scale:.3g}")
    assert not wrong, "\n".join(wrong)


def _with_more_rows(leaf: Any) -> Any:
    """Return a leaf of the batch with two more rows, along its last dim but one if it has several."""
    axis = max(np.ndim(leaf) - 2, 0)
    return np.concatenate([leaf, np.flip(leaf, axis)[*[slice(None)] * axis, :2]], axis) if np.ndim(leaf) else leaf


def _moved(leaf: Any, m: int) -> Any:
    """Return a leaf of the batch as it is in micro-batch m."""
    return np.roll(leaf, m) if np.ndim(leaf) else np.bool_(bool(leaf) ^ bool(m % 2))
