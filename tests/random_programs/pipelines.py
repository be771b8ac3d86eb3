"""Test loss, gradients, aux and state of pipelines of random stages, placements and schedules by a dense program."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ipu_jax import Pipeline, make_mesh, verify
from ipu_jax.core.engine import _carry
from ipu_jax.schedules import Schedule
from random_programs import placed
from random_programs.closeness import assert_close, coarsest, nudged
from random_programs.dice import Dice
from random_programs.drawing import draw_model
from random_programs.model import Model
from random_programs.plain import Dense
from random_programs.tables import random_table
from support.platforms import programs_for


class Case:
    """A case of a pipeline, and what is tested besides its gradients."""

    def __init__(self, dice: Dice):
        self.model = draw_model(dice)
        self.table_seed = dice.number()
        self.judges_verify, self.evaluates = dice.chance(0.1), dice.chance(0.15)
        self.predicted = dice.between(1, 7) if dice.chance(0.3) else 0  # micro-batches

    def __str__(self) -> str:
        return f"{self.model}\n  verify: {self.judges_verify}, evaluates: {self.evaluates}, predicted: {self.predicted}"

    def check(self) -> None:
        model = self.model
        schedule: Any = model.schedule
        if schedule == "own":
            rng = np.random.default_rng(self.table_seed)
            schedule = Schedule(
                "own", model.placement, model.ipus, *random_table(rng, model.placement, model.micro_batches)
            )
        pipeline = pipeline_of(model, schedule)
        assert_right(model, pipeline, evaluates=self.evaluates)
        if self.predicted:
            assert_predicts(model, pipeline, self.predicted)
        if self.judges_verify:
            verify(pipeline, *arguments(model, pipeline))


def pipeline_of(model: Model, schedule: str | Schedule) -> Pipeline:
    return Pipeline(
        placed.stages_of(model),
        mesh=make_mesh(model.replicas, model.ipus),
        schedule=schedule,
        gradient_accumulation=model.micro_batches,
        reduction=model.reduction,
        specs=placed.specs_of(model),
        frozen=placed.frozen_of(model),
    )


def arguments(model: Model, pipeline: Pipeline) -> tuple[Any, Any, Any, Any]:
    """Return weights, batch, state and key, in the form that `value_and_grad` takes."""
    batch = model.batch()
    if model.replicas == 1:
        batch = {name: leaf[0] for name, leaf in batch.items()}
    state = pipeline.shard_state(model.state()) if model.state() else None
    key = jax.random.key(model.seed) if model.random else None
    return pipeline.shard(model.weights()), batch, state, key


def assert_right(model: Model, pipeline: Pipeline, *, evaluates: bool = False) -> None:
    """Raise `AssertionError` if the pipeline's results differ from the dense program's."""
    given = arguments(model, pipeline)
    with bubbles_of_nan(), programs_for(("cpu", "tpu", "gpu")[model.micro_batches % 3]):
        loss, aux, gradients, new = parts(model, pipeline.value_and_grad(*given))
    dense = (model.weights(), model.batch(), model.state(), given[3])
    exact, in_own_dtypes = Dense(model, exact=True).run(*dense), Dense(model, exact=False)
    runs = [in_own_dtypes.run(*dense)] + [in_own_dtypes.run(nudged(dense[0], seed), *dense[1:]) for seed in range(3)]
    if model.dtypes != {"float32"}:
        runs.append(Dense(model, exact=False, fused=False).run(*dense))
    rounded = list(zip(*runs, strict=True))
    of_aux = lambda whole: whole if model.replicas > 1 else jax.tree.map(lambda leaf: leaf[0], whole)
    eps = coarsest(model.dtypes)
    gradients = pipeline.unshard(gradients)
    for leaf, weight in zip(jax.tree.leaves(gradients), jax.tree.leaves(model.weights()), strict=True):
        assert leaf.dtype == weight.dtype, f"a gradient is {leaf.dtype}, and its weight {weight.dtype}"
    assert_close("loss", loss, exact[0], rounded[0], eps)
    assert_close("gradients", gradients, exact[1], rounded[1], eps)
    assert_close("aux", aux, of_aux(exact[2]), [of_aux(aux) for aux in rounded[2]], eps)
    if new is not None:
        assert_close("state", pipeline.unshard(new), exact[3], rounded[3], eps)
    if evaluates:
        evaluated = pipeline.loss(*given)
        assert_close("evaluated loss", evaluated[0] if aux else evaluated, exact[0], rounded[0], eps)


def assert_predicts(model: Model, pipeline: Pipeline, micro_batches: int) -> None:
    """Raise `AssertionError` if the predictions for this number of micro-batches differ from the dense program's."""
    params, _, state, key = arguments(model, pipeline)
    batch = dataclasses.replace(model, micro_batches=micro_batches).batch(1)
    batch = {name: leaf for name, leaf in batch.items() if name not in ("labels", "y")}  # prediction has no targets
    given = batch if model.replicas > 1 else {name: leaf[0] for name, leaf in batch.items()}
    with bubbles_of_nan(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*predict drops the state")  # running averages, which are only read
        found = pipeline.predict(params, given, state, key)
    found = np.asarray(found).reshape(model.replicas, micro_batches, *found.shape[-2:])
    exact = Dense(model, exact=True).predict(model.weights(), batch, model.state(), key)
    own = [
        Dense(model, exact=False, fused=fused).predict(nudged(model.weights(), 0), batch, model.state(), key)
        for fused in (True, False)
    ]
    assert_close("predictions", found, exact, own, coarsest(model.dtypes))


def parts(model: Model, result: Any) -> tuple[Any, dict[int, Any], Any, Any]:
    """Return loss, aux of each stage, gradients and new state from the result of `value_and_grad`."""
    value, gradients, *new = result
    with_aux = [i for i, piece in enumerate(model.pieces) if piece.aux]
    if not with_aux:
        return value, {}, gradients, new[0] if new else None
    loss, aux = value
    last = len(model.pieces) - 1
    by_stage = {last: aux} if with_aux == [last] else {i: aux[f"stage{i}"] for i in with_aux}
    return loss, by_stage, gradients, new[0] if new else None


@contextlib.contextmanager
def bubbles_of_nan() -> Iterator[None]:
    """Fill buffers that nothing has been written to with NaN, so that a bubble that leaks is noticed."""
    before, _carry.IDLE_FILL = _carry.IDLE_FILL, float("nan")
    try:
        yield
    finally:
        _carry.IDLE_FILL = before
