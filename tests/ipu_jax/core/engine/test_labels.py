"""Test the names of scans: equal for the same plan, and different for any other."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from ipu_jax import Pipeline, Stage, make_schedule
from ipu_jax.schedules import Schedule


def scans_of(schedule: Schedule | str = "grouped", m=3, names=("a", "b"), ways=("value_and_grad",)):
    """Return the names of the scans of a model of two stages: a digest of each plan, and one of its stages' names."""
    first = Stage(lambda w, x, batch: jnp.tanh(batch @ w), params="a", ipu=0, name=names[0])
    last = Stage(lambda w, x, batch: jnp.mean((x @ w) ** 2), params="b", ipu=1, name=names[1])
    pipeline = Pipeline([first, last], gradient_accumulation=m, schedule=schedule)
    params = pipeline.shard({"a": jnp.ones((4, 4)), "b": jnp.ones((4, 1))})
    text = "".join(
        jax.jit(getattr(pipeline, way)).lower(params, jnp.ones((m, 2, 4))).as_text(debug_info=True) for way in ways
    )
    return set(re.findall(r"ipu_jax\.plan\.([0-9a-f]+)\.([0-9a-f]+)", text))


@pytest.mark.slow
def test_a_scan_is_named_by_its_plan():
    (plan,) = scans_of()
    ((same, called),) = scans_of(names=("a", "other"))
    assert (same, called != plan[1]) == (plan[0], True)
    grouped, gpipe = (make_schedule(name, ipus=2, gradient_accumulation=3) for name in ("grouped", "gpipe"))
    assert scans_of(grouped) == {plan}
    others = [
        scans_of(m=4),
        scans_of(gpipe),
        scans_of(dataclasses.replace(gpipe, name="grouped")),  # other tables under the same name
        scans_of(ways=("loss",)),
    ]
    assert len({plan[0], *(structure for ((structure, _),) in others)}) == 5
