"""Test runs in lockstep summed by hand, and schedules out of order.

Nothing here depends on the simulator, the families or the validator: the tables are drawn and the sums written out.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.core.schedules import Schedule, make_schedule
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.refusals import refused

# lockstep: the IPUs wait for each other where a message crosses, and in concurrent stages; between two such moments
# each does its own tasks

TWO = {"placement": (0, 1), "forward": [5, 3], "backward": [4, 2], "weight": [1.5, 0.5]}
CONCURRENT = {
    # each of the two IPUs does half of a concurrent stage: F is 1 and 2, B 3 and 4
    "placement": (None, 0, 1, None),
    "forward": [2, 5, 3, 4],
    "backward": [6, 4, 2, 8],
    "weight": [0, 1.5, 0.5, 0],
}
FOUR = {"forward": [5, 3, 1, 2], "backward": [4, 2, 3, 6], "weight": [1, 0.5, 2, 1]}

# name -> its costs, its rows of the picture, and the times from one such moment to the next, in order
BY_HAND = {
    "sequential": (
        TWO,
        "0F0 | . | 0B0 | 0F1 | . | 0B1",
        ". | 1F0 1B0 | . | . | 1F1 1B1 | .",
        [5, 3 + 2, 4 + 5, 3 + 2, 4],
    ),
    "grouped": (TWO, "0F0 | 0F1 | 0B0 | 0B1", ". | 1F0 1B0 | 1F1 1B1 | .", [5, max(5, 3 + 2), max(4, 3 + 2), 4]),
    "grouped-zb": (
        TWO,  # B without W is 2.5 and 1.5
        "0F0 | 0F1 | 0B0 0W0 | 0B1 0W1",
        ". | 1F0 1B0 | 1F1 1B1 1W0 | 1W1",
        [5, max(5, 3 + 1.5), max(2.5 + 1.5, 3 + 1.5 + 0.5), max(2.5 + 1.5, 0.5)],
    ),
    "interleaved": (
        {**TWO, "forward": [6, 3]},
        "0F0 | . | 0F1 | 0B0 | . | 0B1",
        ". | 1F0 | 1B0 | 1F1 | 1B1 | .",
        [6, max(6, 3 + 2), max(4, 3 + 2), 4],
    ),
    "gpipe": (
        TWO,
        "0F0 | 0F1 | . | . | 0B0 | 0B1",
        ". | 1F0 | 1F1 | 1B0 | 1B1 | .",
        [5, max(5, 3), 3 + 2, max(4, 2), 4],
    ),
    "1f1b": (
        TWO,
        "0F0 | 0F1 | . | 0B0 | . | 0B1",
        ". | 1F0 | 1B0 | 1F1 | 1B1 | .",
        [5, max(5, 3), 2, max(4, 3 + 2), 4],
    ),
    "zb-h1": (
        TWO,  # B without W is 2.5 and 1.5
        "0F0 | 0F1 | . | 0B0 | 0W0 | 0B1 | 0W1",
        ". | 1F0 | 1B0 | 1F1 | 1B1 | 1W0 | 1W1",
        [5, max(5, 3), 1.5, max(2.5 + 1.5, 3 + 1.5), max(2.5 + 1.5, 0.5 + 0.5)],
    ),
    "looped": (
        {**FOUR, "placement": (0, 1, 0, 1)},
        "0F0 | 0F1 | 2F0 | 2F1 | . | 2B0 | . | 2B1 | 0B0 | 0B1",
        ". | 1F0 | 1F1 | 3F0 | 3B0 | 3F1 | 3B1 | 1B0 | 1B1 | .",
        [5, max(5, 3), max(1, 3), max(1, 2), 6, max(3, 2), 6, max(3, 2), max(4, 2), 4],
    ),
    "zbv": (
        {**FOUR, "placement": (0, 1, 1, 0)},  # B without W is 3, 1.5, 1 and 5; stages 1 and 2 run as one
        "0F0 | 0F1 | 3F0 | 3B0 | 3F1 | 3B1 | 0B0 | 3W0 | 0B1 | 0W0 | 3W1 | 0W1",
        ". | 1F0 2F0 | 1F1 2F1 | . | 2B0 1B0 | . | 2B1 1B1 | 2W0 1W0 | 2W1 1W1 | . | . | .",
        [5, max(5, 4), max(2, 4), 5, max(2, 2.5), 5, max(3, 2.5), max(1 + 3 + 1 + 1 + 1, 2.5 + 2.5)],
    ),
    "grouped, concurrent ends": (
        CONCURRENT,
        "0F0 1F0 | 0F1 1F1 3F0 3B0 | 3F1 3B1 1B0 0B0 | 1B1 0B1",
        "0F0 | 0F1 2F0 3F0 3B0 2B0 | 2F1 3F1 3B1 2B1 0B0 | 0B1",
        [1, 5, 1, max(5, 3), 2 + 4, 2, 3, 2 + 4, max(4, 2), 3, 4, 3],
    ),
    "zb-h1, concurrent ends": (
        CONCURRENT,
        "0F0 1F0 | 0F1 1F1 3F0 3B0 | . | 1B0 3F1 3B1 0B0 | 1W0 | 1B1 0B1 | 1W1",
        "0F0 | 0F1 2F0 3F0 3B0 | 2B0 | 2F1 3F1 3B1 0B0 | 2B1 | 2W0 0B1 | 2W1",
        [1, 5, 1, max(5, 3), 2 + 4, 1.5, max(2.5, 3), 2 + 4, 3, max(1.5, 1.5), max(2.5, 0.5), 3, max(1.5, 0.5)],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_makespans_in_lockstep_by_hand(case):
    costs, first, second, times = BY_HAND[case]
    name = case.split(",")[0]
    schedule = make_schedule(name, placement=costs["placement"], gradient_accumulation=2)
    of = ", one-phase clock" if name not in ("sequential", "grouped", "grouped-zb") else ""
    drawn = Schedule.from_text(f"{name}: 2 stages on 2 IPUs, as drawn{of}\nIPU 0 | {first}\nIPU 1 | {second}")
    assert drawn == schedule
    run = schedule.simulate(costs["forward"], costs["backward"], costs["weight"], lockstep=True)
    assert run.makespan == pytest.approx(sum(times))
    shares = [
        (f + b) * (1 if ipu is not None else 0.5)
        for f, b, ipu in zip(costs["forward"], costs["backward"], costs["placement"], strict=True)
    ]
    busy = [2 * sum(s for s, ipu in zip(shares, costs["placement"], strict=True) if ipu in (None, k)) for k in range(2)]
    assert run.busy == pytest.approx(tuple(busy))
    if None not in costs["placement"]:
        slower = schedule.simulate(costs["forward"], costs["backward"], costs["weight"], 0.25, lockstep=True)
        # "grouped" hides all messages but the first y and the last dx, and with W of its own IPU 1 hides the dx, too
        shown = {"grouped": 2, "grouped-zb": 1}.get(name, len(times) - 1)
        assert slower.makespan == pytest.approx(sum(times) + 0.25 * shown)
    assert run.bubble == pytest.approx(1 - sum(busy) / (2 * sum(times)))


# out of order


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("mine", (0,), 1, ((1, 0),), ((2, 3),), None, "one-phase"),
        Schedule("mine", (0, None), 2, ((1, 0), (2, 1)), ((4, 3), (2, 1)), None, "one-phase"),
    ],
    ids=["one IPU", "a concurrent stage"],
)
def test_micro_batches_out_of_order_are_refused_where_a_stage_holds_state(schedule):
    def stages(*, stateful: bool) -> list[Stage]:
        def fn(p, x, mb, **state):
            y = jnp.mean((mb if x is None else x) ** 2)
            return Outputs(y, state=state["state"] + 1) if stateful else y

        found = [Stage(lambda p, x, mb: jnp.sin(mb), ipu=0)] if len(schedule.placement) > 1 else []
        place = schedule.placement[len(found)]
        last = Stage(fn, ipu=ALL_IPUS if place is None else place, name="counts", state="s" if stateful else None)
        return [*found, last]

    options = {"mesh": make_mesh(1, schedule.ipus), "schedule": schedule, "gradient_accumulation": 2}
    with refused("schedule 'mine' runs F of stage 'counts'", "out of the micro-batches' order", "hold no state"):
        Pipeline(stages(stateful=True), **options)
    pipeline = Pipeline(stages(stateful=False), **options)
    batch = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    expected = np.mean(batch**2 if len(schedule.placement) == 1 else np.sin(batch) ** 2)
    assert float(pipeline.value_and_grad(pipeline.shard({}), batch)[0]) == pytest.approx(expected, rel=1e-5)


# the ticks of two stages, per stage and micro-batch: messages between IPUs keep their order, so both have the same one
FORWARD = {"in order": ((0, 1), (1, 2)), "second first": ((1, 0), (2, 1))}
BACKWARD = {"in order": ((4, 5), (3, 4)), "second first": ((5, 4), (4, 3))}


@pytest.mark.fast(
    "in order-in order-both",
    "second first-second first-last",
    "second first-second first-both",
    "second first-in order-first",
)
@pytest.mark.parametrize(
    ("forward", "backward", "holds"),
    [
        ("in order", "in order", "both"),
        ("in order", "second first", "first"),
        ("in order", "second first", "last"),
        ("second first", "in order", "first"),
        ("second first", "second first", "last"),
        ("second first", "second first", "both"),
    ],
)
def test_f_of_a_stage_with_state_must_be_in_order_and_b_need_not(forward, backward, holds):
    """The new state tells the order of the micro-batches: it is 10 times the old one plus the micro-batch's number."""
    stages = []
    for k, name in enumerate(("first", "last")):

        def fn(p, x, mb, *, state=None, k=k):
            y = (mb["x"] if x is None else x) * p
            y = y if k == 0 else jnp.mean(y**2)
            return y if state is None else Outputs(y, state=10 * state + mb["number"])

        held = f"of {name}" if holds in (name, "both") else None
        stages.append(Stage(fn, params=name, ipu=k, name=name, state=held))
    schedule = Schedule("mine", (0, 1), 2, FORWARD[forward], BACKWARD[backward], None, "one-phase")
    options = {"mesh": make_mesh(1, 2), "schedule": schedule, "gradient_accumulation": 2}
    if forward == "second first":
        named = "first" if holds == "both" else holds
        with refused(f"schedule 'mine' runs F of stage {named!r}", "out of the micro-batches' order"):
            Pipeline(stages, **options)
        return
    pipeline = Pipeline(stages, **options)
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    state = pipeline.shard_state({stage.state: np.float32(3) for stage in stages if stage.state})
    params = pipeline.shard({"first": np.float32(2), "last": np.float32(0.5)})
    loss, gradients, new = pipeline.value_and_grad(params, {"x": x, "number": np.array([1, 2], np.float32)}, state)
    squares = np.mean(x**2)  # the loss is (2 * 0.5) ** 2 times these
    assert float(loss) == pytest.approx(squares, rel=1e-5)
    assert pipeline.unshard(gradients) == pytest.approx({"first": squares, "last": 4 * squares}, rel=1e-5)
    assert pipeline.unshard(new) == {stage.state: 312 for stage in stages if stage.state}
