"""Test what schedules, their simulator and their search refuse: wrong tables and drawings, and wrong arguments."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipu_jax import Outputs, Pipeline, Stage
from ipu_jax.core.analysis.balance import balance_layers, measure_costs
from ipu_jax.core.schedules import SCHEDULES, Schedule, StageCosts, Task, find_schedule, make_schedule
from support.refusals import refusals, refused

ONE, TWO = "one-phase", "two-phase"
BAD_COUNTS = (0, -1, 2.0, 2.5, "2", True, np.float32(2), np.array([2]), math.nan)
CHOICES = ", ".join(map(repr, (*SCHEDULES, "auto")))


def row(function: Any, *arguments: Any, **named: Any) -> Callable[[], Any]:
    """Return a call with these arguments, which need not have the right types."""
    return functools.partial(function, *arguments, **named)


def table(rows: Any) -> Any:
    """Return `((0, 1), (1, 3))` for `"01 13"`: a word for each stage, a digit for each micro-batch."""
    return tuple(tuple(map(int, word)) for word in rows.split()) if isinstance(rows, str) else rows


def mine(placement: Any, forward: Any, backward: Any, weight: Any = None, clock: Any = TWO) -> Callable[[], Schedule]:
    return row(Schedule, "mine", placement, 2, table(forward), table(backward), table(weight), clock)


@refusals(
    # a task before what it needs
    (mine((0,), "1", "0"), "IPU 0, tick 0, 0B0", "needs 0F0, which runs in tick 1", "tick 1 or later"),
    (mine((0,), "1", "0", clock=ONE), "IPU 0, tick 0, 0B0", "needs 0F0, which runs in tick 1", "tick 2 or later"),
    (mine((0, 1), "0 1", "2 0"), "IPU 1, tick 0, 1B0", "needs 1F0, which runs in tick 1", "tick 1 or later"),
    (mine((0,), "0", "2", "1", ONE), "IPU 0, tick 1, 0W0", "needs 0B0, which runs in tick 2", "tick 3 or later"),
    # what is sent between IPUs is there in the next tick
    (mine((0, 1), "1 0", "3 2"), "IPU 1, tick 0, 1F0", "0F0, which runs in tick 1", "between IPUs", "tick 2 or later"),
    (mine((0, 1), "0 0", "1 0"), "IPU 1, tick 0, 1F0", "0F0, which runs in tick 0", "between IPUs", "tick 1 or later"),
    (mine((0, 1), "0 1", "1 1"), "IPU 0, tick 1, 0B0", "1B0, which runs in tick 1", "between IPUs", "tick 2 or later"),
    (mine((0, 1), "0 0", "3 2", clock=ONE), "IPU 1, tick 0, 1F0", "0F0", "between IPUs", "tick 1 or later"),
    (mine((0, 1), "0 1", "2 2", clock=ONE), "IPU 0, tick 2, 0B0", "1B0", "between IPUs", "tick 3 or later"),
    # concurrent stages behind local ones
    (mine((0, None, 0), "0 0 1", "2 1 1"), "all IPUs, tick 0, 1F0", "needs 0F0, which runs in tick 0", "tick 1 or"),
    (mine((0, None, 0), "0 1 1", "1 1 1"), "IPU 0, tick 1, 0B0", "needs 1B0, which runs in tick 1", "tick 2 or later"),
    (mine((0, None, 1), "0 1 1", "1 1 1"), "IPU 0, tick 1, 0B0", "needs 1B0, which runs in tick 1", "tick 2 or later"),
    (mine((0, None), "0 1", "1 1", clock=ONE), "IPU 0, tick 1, 0B0", "needs 1B0, which runs in tick 1", "tick 2 or"),
    (mine((0, None, 1), "0 0 1", "4 3 2", clock=ONE), "all IPUs, tick 0, 1F0", "needs 0F0, which", "tick 1 or later"),
    (mine((0, None, 1), "0 1 1", "2 2 2", clock=ONE), "IPU 0, tick 2, 0B0", "needs 1B0, which", "tick 3 or later"),
    # messages that wait under the two-phase clock: between IPUs, for the head, for exit, and of an entry
    (mine((0, 1), "01 34", "45 34"), "IPU 0, tick 1, 0F1", "of 0F0 before 1F0 in tick 3", "none may wait", f"'{ONE}'"),
    (mine((0, 1), "01 12", "45 12"), "IPU 1, tick 2, 1B1", "of 1B0 before 0B0 in tick 4", "none may wait", f"'{ONE}'"),
    (mine((0, None), "01 12", "12 12"), "IPU 0, tick 1, 0F1", "of 0F0 before 1F0 in tick 1", "may wait", f"'{ONE}'"),
    (mine((None, 0), "01 01", "12 01"), "IPU 0, tick 1, 1B1", "of 1B0 before 0B0 in tick 1", "may wait", f"'{ONE}'"),
    (mine((None, 0), "01 12", "12 12"), "all IPUs, tick 1, 0F1", "0F0 before 1F0 in tick 1", "may wait", f"'{ONE}'"),
    # messages that cross
    (mine((0, 1), "01 32", "67 45", clock=ONE), "IPU 1, tick 2, 1F1", "cross", "0F0 (tick 0)", "0F1 (tick 1)", "order"),
    (mine((0, 1), "01 12", "76 34", clock=ONE), "IPU 0, tick 6, 0B1", "cross", "1B0 (tick 3)", "1B1 (tick 4)", "order"),
    # slots that are not free: of the stash, the cut and the inbox
    (mine((0,), "012", "213"), "IPU 0, tick 2, 0F2", "slot 0 of 2 of the stash", "0B0 in tick 2", "in order"),
    (mine((0,), "014", "526", clock=ONE), "tick 4, 0F2", "slot 0 of 2 of the stash", "0B0 in tick 5", "in order"),
    (mine((0,), "012", "346", "758", ONE), "IPU 0, tick 6, 0B2", "slot 0 of 2 of the cut", "0W0 in tick 7", "in order"),
    (
        mine((0, 1), "021 243", ((12, 14, 13), (9, 11, 10)), clock=ONE),
        *("IPU 0, tick 1, 0F2", "slot 0 of 2 of the inbox", "1F0 in tick 2", "in order"),
    ),
    # too much in a tick
    (mine((0, 1), "00 12", "23 12"), "IPU 0, tick 0, 0F1", "0F0 has this tick", "F of one micro-batch", "move one"),
    (mine((0, 1), "01 12", "33 12"), "IPU 0, tick 3, 0B1", "0B0 has this tick", "B of one micro-batch", "move one"),
    (mine((0, 1, 0), "00 12 24", "88 67 35", clock=ONE), "IPU 0, tick 0, 0F1", "0F0 has this tick", "move one"),
    (mine((0, 1, 0), "02 13 24", "78 56 35", clock=ONE), "IPU 0, tick 2, 2F0", "does 0F1", "one task", "move one"),
    (mine((0,), "01", "12", clock=ONE), "IPU 0, tick 1, 0B0", "does 0F1", "one task", "move one"),
    # what must share a tick, and ticks that are none
    (mine((0, 0), "0 1", "2 2", clock=ONE), "IPU 0, tick 1, 1F0", "0F0 runs in tick 0", "neighbour", "the same tick"),
    (mine((None, None, 0), "01 12 23", "45 45 34"), "all IPUs, tick 1, 1F0", "0F0", "neighbour", "the same tick"),
    (mine((0, 1, 1, 0), "01 12 12 23", "56 45 34 23"), "tick 3, 2B0", "1B0 runs in tick 4", "neighbour", "same tick"),
    (mine((None,), "0", "1"), "all IPUs, tick 1, 0B0", "0F0 runs in tick 0", "F and B in one tick", "the same tick"),
    (mine((0, None), "0 0", "1 0", "2 3", ONE), "all IPUs, tick 3, 1W0", "no W", "tick 0", "repeat that tick"),
    (mine((0,), ((0, -1),), "01"), "IPU 0, tick -1, 0F1", "there is no such tick", "first is tick 0"),
    (mine((0,), ((0, -1),), "23", clock=ONE), "IPU 0, tick -1, 0F1", "there is no such tick", "first is tick 0"),
    (mine((0,), "0", ((1 << 40,),), clock=ONE), "0B0", "no such tick", "the last is tick 4294967296", "leave out"),
)
def test_a_wrong_table_is_refused_naming_the_cell(call, holds):
    with refused("schedule 'mine': ", *holds):
        call()


# Tables out of shape: of what is given, all but the named field is right.
RIGHT = {"name": "mine", "placement": (0, 1), "ipus": 2, "clock": ONE}
RIGHT |= {"forward": table("0 1"), "backward": table("3 2")}
JOINT = {"placement": (None, None)} | dict.fromkeys(("forward", "backward", "weight"), table("0 0"))


def shaped(**fields: Any) -> Callable[[], Schedule]:
    return row(Schedule, **RIGHT | fields)


@refusals(
    (mine((0, 1), "01 1", "23 12"), "forward table", "2 stages x 2 micro-batches"),
    (mine((0, 1), "01 12", "23 1"), "backward table", "2 stages x 2 micro-batches"),
    (mine((0, 1), "01", "23 12"), "forward table", "2 stages x 2 micro-batches"),
    (mine((0, 1), "01 12", "23 12 12"), "backward table", "2 stages x 2 micro-batches"),
    (shaped(weight=((4,),)), "weight table", "2 stages x 1 micro-batches"),
    (mine((), (), ()), "'mine' is empty", "at least one stage and one micro-batch"),
    (mine((0,), ((),), ((),)), "'mine' is empty", "at least one stage and one micro-batch"),
    (mine((0,), (), ()), "'mine' is empty", "at least one stage and one micro-batch"),
    (shaped(placement=()), "'mine' is empty", "at least one stage and one micro-batch"),
    (shaped(forward=()), "'mine' is empty", "at least one stage and one micro-batch"),
    (shaped(placement=(0, 2)), "stage 1 is on IPU 2", "outside the replica", "IPUs 0 to 1"),
    (mine((0, -1), "0 1", "2 1"), "stage 1 is on IPU -1", "outside the replica", "IPUs 0 to 1"),
    (shaped(clock="one-fase"), "clock='one-fase'", "did you mean 'one-phase'", "'two-phase', 'one-phase'"),
    (shaped(name="my\nown"), "name='my\\nown'", "header", "give one line"),
    (shaped(name=3), "name=3 ", "header", "give one line"),
    (shaped(**JOINT), "'mine'", "concurrent stages have no W", "give weight=None"),
    *((shaped(ipus=bad), f"ipus={bad!r} ", "is not a count", "an int of at least 1") for bad in (*BAD_COUNTS, None)),
    *((shaped(placement=(0, bad)), f"stage 1 is on IPU {bad!r}:", "an int, or None") for bad in (0.0, "0", True, (0,))),
    *(
        (shaped(backward=((3,), (bad,))), f"1B0 is in tick {bad!r}", "an int of at least 0")
        for bad in (1.0, "1", None, True, np.float64(1))
    ),
    *((shaped(backward=bad), f"backward table is {bad!r}", "a row of ticks") for bad in (None, 3, "01", (0, 1))),
)
def test_a_table_out_of_shape_is_refused(call, holds):
    Schedule(**RIGHT)
    with refused(*holds):
        call()


# Tasks and drawings

ROWS_OF_ALL = "give a row for each IPU, 'IPU 0', 'IPU 1' and so on"


def drawing(text: Any) -> Callable[[], Schedule]:
    return row(Schedule.from_text, text)


@refusals(
    *(
        (row(Task.parse, text), repr(text), "is not a task", "stage, F, B or W, micro-batch, as in '2F0'")
        for text in ("", "F", "2F", "F0", "2X0", "2f0", "-1F0", "2F0 ", "2F0\n", "2F-1", "2.0F1")
    ),
    (drawing(""), "of IPUs []", ROWS_OF_ALL),
    (drawing("IPU 1  0F0  0B0"), "of IPUs [1]", ROWS_OF_ALL),
    (drawing("IPU 0  0F0\nIPU 0  0B0"), "IPU 0 has two rows", "give each IPU one"),
    (drawing("IPU 0  .  ."), "no tasks", "as in '2F0'"),
    (drawing("IPU 0  0F0  0X0"), "IPU 0, tick 1", "'0X0' is not a task", "as in '2F0'"),
    (drawing("IPU 0  0F0  0F0"), "IPU 0, tick 1", "0F0 is there already in tick 0", "each task once"),
    (drawing("IPU 0  0F0 0F0"), "IPU 0, tick 0", "0F0 is there already in tick 0", "each task once"),
    (drawing("IPU 0  0F0  0B0  0F1"), "0B1 is missing", "IPU 0 must do it"),
    (drawing("IPU 0  0F0  0B0  0W0  0F1  0B1"), "0W1 is missing", "IPU 0 must do it"),
    (drawing("IPU 0  0F0 2F0  0B0"), "stage 1 is missing", "without a gap"),
    (drawing("IPU 0  0F0  .\nIPU 1  .  0B0"), "0F0", "IPUs [0]", "stage 0 in those of [0, 1]", "or on all of them"),
    (drawing("IPU 0  0F0\nIPU 1  0F0\nIPU 2  ."), "0F0", "IPUs [0, 1]", "stage 0 in those of [0, 1]", "or on all"),
    (drawing("IPU 0  0F0  0B0\nhello"), "'hello'", "not a line of a schedule", "'IPU' and a number"),
    (drawing(3), "text=3 ", "not a string", "str(schedule)"),
    (  # one cell of a long drawing
        drawing(str(make_schedule("1f1b", ipus=3, gradient_accumulation=4)).replace("1F2", "1F1")),
        *("IPU 1, tick 5", "1F1 is there already in tick 2", "each task once"),
    ),
)
def test_a_task_or_drawing_that_is_wrong_is_refused(call, holds):
    with refused(*holds):
        call()


# make_schedule


def make(name: Any = "grouped", **arguments: Any) -> Callable[[], Schedule]:
    return row(make_schedule, name, **{"ipus": 2, "gradient_accumulation": 1} | arguments)


def _named(name: Any) -> tuple[Callable[[], Any], ...]:
    return make(name), row(Pipeline, [Stage(lambda p, x, mb: x)], schedule=name)


@refusals(
    *(
        (call, f"schedule={name!r} is unknown", f"did you mean {nearest!r}?", CHOICES)
        for name, nearest in (
            ("groupd", "grouped"),
            ("1F1C", "1f1b"),
            ("GPype", "gpipe"),
            ("ZB-H2", "zb-h1"),
            ("ZBW", "zbv"),
            ("Interleave", "interleaved"),
        )
        for call in _named(name)
    ),
    *(
        (make(name), f"schedule={name!r} is unknown: choose one of", CHOICES)
        for name in ("?", 1, None, b"1f1b", ("a",))
    ),
    (make(ipus=None), "give ipus=", "placement="),
    (make("zbv", ipus=None), "give ipus=", "placement="),
    (make(placement=()), "placement=()", "no stages", "at least one"),
    *((make(placement=bad), f"placement={bad!r} ", "not a placement", "as in (0, 1, None)") for bad in (3, "01", 1.5)),
    *((make(name, placement=(0, 2)), "stage 1 is on IPU 2", "IPUs 0 to 1") for name in ("grouped", "1f1b")),
    *(
        (make(placement=(0, bad)), f"stage 1 is on IPU {bad!r}:", "an int, or None for a concurrent stage")
        for bad in (0.0, "0", True, np.float32(1), (0,), math.nan)
    ),
    *(
        (call, f"{of}={bad!r} ", "is not a count", "an int of at least 1")
        for bad in BAD_COUNTS
        for of, call in (("ipus", make(ipus=bad)), ("ipus", make("1f1b", ipus=bad, placement=(0, 1))))
    ),
    *(
        (call, f"{of}={bad!r} ", "is not a count", "an int of at least 1")
        for bad in (*BAD_COUNTS, None)
        for of, call in (
            ("gradient_accumulation", make("gpipe", gradient_accumulation=bad)),
            ("rounds", make("looped", rounds=bad)),
            ("ipus", row(balance_layers, "ab", [1, 1], bad)),
            ("rounds", row(balance_layers, "ab", [1, 1], 1, rounds=bad)),
        )
    ),
    # placements that a family cannot serve
    (
        make("zbv", placement=(0, 1, 0, 1)),
        "'zbv'",
        "on [0, 1, 0, 1]: it needs them folded",
        "as in [0, 1, 1, 0]",
        "'zb-h1' serves",
    ),
    (make("dualpipev", ipus=3, placement=(0, 1, 2)), "'dualpipev'", "[0, 1, 2]", "folded", "'zb-h1' serves any"),
    (make("looped", placement=(0, 1, 1, 0)), "'looped'", "[0, 1, 0]", "round after round", "'1f1b' serves any"),
    (
        make("zb-wave", ipus=3, placement=(0, 1, 2) * 2),
        "'zb-wave'",
        "[0, 1, 2, 0, 1, 2]",
        "in sweeps",
        "'zb-h1' serves",
    ),
    # families know no costs
    (
        make("1F1B", costs=StageCosts([1], [1], [1])),
        "costs=StageCosts",
        "'auto'",
        "'1f1b' knows no costs",
        "leave it out",
    ),
    (make("zbv", stash_limit=3), "stash_limit=3 ", "'auto'", "'zbv' knows no costs", "leave it out"),
)
def test_what_make_schedule_and_balance_layers_do_not_take_is_refused(call, holds):
    with refused(*holds):
        call()


# costs: of the simulator, of `balance_layers`, of `StageCosts` and of the search

BAD_COSTS = (-1, math.nan, math.inf, "1", True, 1j, {"a": 1})
NO_NUMBERS = "is not a list of numbers"


def simulate(*costs: Any, **named: Any) -> Callable[[], Any]:
    return row(make_schedule("zb-h1", ipus=2, gradient_accumulation=2).simulate, *costs, **named)


def balance(costs: Any, **named: Any) -> Callable[[], Any]:
    return row(balance_layers, "ab", costs, 2, **named)


def stage_costs(**costs: Any) -> Callable[[], Any]:
    return row(StageCosts, **{"forward": [1, 1], "backward": [1, 1], "weight": [1, 1]} | costs)


def search(**arguments: Any) -> Callable[[], Any]:
    given = {"costs": StageCosts([1, 1], [1, 1], [1, 1], stash=[3, 5]), "placement": (0, 1), "gradient_accumulation": 2}
    return row(find_schedule, **given | arguments)


@refusals(
    *(
        (call, f"{of}={bad!r} ", f"is not a {what}", "a finite number of at least 0")
        for bad in (*BAD_COSTS, None)
        for of, what, call in (
            ("forward", "cost", simulate(bad)),
            ("backward", "cost", simulate(1, bad)),
            ("forward[1]", "cost", simulate([1, bad])),
            ("transfer", "cost", simulate(1, 2, 1, bad)),
            ("layer 'b': costs[1]", "cost", balance([1, bad])),
        )
    ),
    *(
        (call, f"{of}={bad!r} ", f"is not a {what}", "a finite number of at least 0")
        for bad in BAD_COSTS
        for of, what, call in (
            ("weight", "cost", simulate(1, 2, bad)),
            ("layer 'b': memory[1]", "size", balance([1, 1], memory=[1, bad], limit=3)),
            ("limit", "size", balance([1, 1], memory=[1, 1], limit=bad)),
        )
    ),
    (simulate([1]), "forward has 1 costs for 2 stages", "one for each stage"),
    (simulate(backward=[1, -1]), "backward[1]=-1 ", "is not a cost", "a finite number of at least 0"),
    (simulate(weight=3), "weight=3 ", "stage 0", "backward=2.0", "the whole backward pass"),
    *((balance(bad), f"costs={bad!r} {NO_NUMBERS}", "one for each layer") for bad in (None, 3, "12", {0: 1, 1: 1})),
    *(
        (balance([1, 1], memory=bad, limit=3), f"memory={bad!r} {NO_NUMBERS}", "one for each layer")
        for bad in (3, "12", {0: 1, 1: 1})
    ),
    (row(balance_layers, 3, [1], 1), "model_layers=3 ", "not a list of layers", "in their order"),
    (stage_costs(forward=1), f"forward=1 {NO_NUMBERS}", "one per stage"),
    (stage_costs(forward="12"), f"forward='12' {NO_NUMBERS}", "one per stage"),
    (stage_costs(stash={0: 1, 1: 2}), f"stash={{0: 1, 1: 2}} {NO_NUMBERS}", "one per stage"),
    (stage_costs(weight=None), f"weight=None {NO_NUMBERS}", "one per stage"),
    (stage_costs(forward=[]), "forward=[]", "no stages", "at least one cost"),
    (stage_costs(backward=[1]), "backward has 1 numbers", "forward has 2", "one per stage"),
    (stage_costs(whole_backward=[1] * 3), "whole_backward has 3 numbers", "forward has 2", "one per stage"),
    (stage_costs(weight=[1, -1]), "weight[1]=-1 ", "is not a cost", "a finite number of at least 0"),
    (stage_costs(forward=[1, math.nan]), "forward[1]=nan ", "is not a cost", "a finite number of at least 0"),
    (stage_costs(stash=[True, 1]), "stash[0]=True ", "is not a size", "a finite number of at least 0"),
    (
        stage_costs(weight_residuals=[1, "1"]),
        "weight_residuals[1]='1' ",
        "is not a size",
        "a finite number of at least",
    ),
    (stage_costs(unit="flops"), "unit='flops' is unknown", "'FLOPs'", "'FLOPs', 'seconds'"),
    (search(costs=3), "costs=3 ", "not a StageCosts", "StageCosts(forward=, backward=, weight=)"),
    (search(placement=(0,)), "costs has 2 stages", "placement has 1", "costs per stage"),
    (search(placement="01"), "placement='01' ", "not a placement", "as in (0, 1, None)"),
    (search(placement=(0, 2), ipus=2), "stage 1 is on IPU 2", "outside the replica", "IPUs 0 to 1"),
    (search(gradient_accumulation=0), "gradient_accumulation=0 ", "is not a count", "an int of at least 1"),
    (search(ipus=1.5), "ipus=1.5 ", "is not a count", "an int of at least 1"),
    (search(transfer=-1), "transfer=-1 ", "is not a cost", "a finite number of at least 0"),
    (search(lockstep=1), "lockstep=1 ", "not a bool", "True or False"),
    (search(seed=None), "seed=None ", "not a seed", "an int"),
    (search(stash_limit=-1), "stash_limit=-1 ", "is not a size", "a finite number of at least 0"),
    (search(stash_limit="9"), "stash_limit='9' ", "is not a size", "a finite number of at least 0"),
    (search(stash_limit=[9, None]), "stash_limit[1]=None ", "is not a size", "a finite number of at least 0"),
    (search(stash_limit=[9]), "stash_limit has 1 sizes for 2 IPUs", "one for each IPU"),
    (search(stash_limit=4), "stash_limit=4 ", "too low", "'sequential'", "holds 3, 5 bytes", "place fewer stages"),
)
def test_costs_and_searches_that_are_wrong_are_refused(call, holds):
    with refused(*holds):
        call()


# measure_costs

FIRST = Stage(lambda w, x, mb: mb @ w, params="a")
LAST = Stage(lambda w, x, mb: jnp.sum(x @ w), params="b")
STATEFUL = Stage(lambda p, x, mb, *, state: Outputs(mb.sum(), state=state), state="s")
WEIGHTS = {"a": np.ones((4, 8)), "b": np.ones((8, 2))}


def measure(stages: Any, params: Any) -> Callable[[], Any]:
    return row(measure_costs, stages, params, np.ones((3, 4)), None)


@refusals(
    (measure([], {}), "stages=()", "empty", "at least one Stage"),
    (measure([FIRST, "last"], WEIGHTS), "stages holds 'last'", "give Stages", "the first one first"),
    (measure(3, WEIGHTS), "stages holds 3", "give Stages", "the first one first"),
    (measure([FIRST, LAST], {"a": 1}), "params: missing 'b'", "which stages name"),
    (measure([FIRST, LAST], [1, 2]), "params is a list", "{group: pytree}"),
    (measure([STATEFUL], {}), "state: missing 's'", "which stages name"),
)
def test_measure_costs_refuses_wrong_stages_params_and_state(call, holds):
    with refused(*holds):
        call()
