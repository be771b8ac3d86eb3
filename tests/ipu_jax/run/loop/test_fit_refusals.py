"""Test what `fit` refuses, before anything is compiled and with nothing used up, and figures that are none."""

from typing import Any

import numpy as np
import pytest

from ipu_jax import Feed, fit, make_mesh
from ipu_jax.observe import RunLog
from ipu_jax.steps import FitResult
from support.fitted import B, D, Lines, M, normal, shared_step, weights
from support.refusals import refused
from support.trained import compiled_quickly

SIZE = M * B
NO_NUMBER = "is not a positive number: give"
TYPE = "is of the wrong type: give"
TAKEN = "has another meaning in the log: choose another"


_compiled_quickly = compiled_quickly()


async def awaited(state):
    return {}


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({"step": "x"}, ["step='x'", "not a training step", "make_train_step"]),
        ({"state": 3}, ["state does not belong to this step", "step.init(params)"]),
        ({"feed": [1]}, ["feed=list", "not a Feed", "give Feed(data, step=step"]),
        ({"epochs": 0}, ["epochs=0", NO_NUMBER]),
        ({"epochs": True}, ["epochs=True", NO_NUMBER]),
        ({"epochs": "1"}, ["epochs='1'", NO_NUMBER]),
        ({"epochs": float("inf")}, ["epochs=inf", NO_NUMBER]),
        ({"updates": 0}, ["updates=0", "at least 1"]),
        ({"updates": 2, "epochs": 1}, ["epochs=1 and updates=2", "give one"]),
        ({"evaluate": 3}, ["evaluate=3 cannot be called", "give a function"]),
        ({"evaluate": lambda state, data: {}}, ["evaluate=<function", "one argument (missing", "'data'", "of a state"]),
        ({"evaluate": lambda: {}}, ["evaluate=<function", "one argument (too many", "a function of a state"]),
        ({"evaluate": lambda state, *, data: {}}, ["evaluate=<function", "one argument (missing", "of a state"]),
        ({"evaluate": awaited}, ["evaluate=<function awaited", "is async", "a function of a state"]),
        ({"say": None}, ["say=None cannot be called", "such as print"]),
        ({"say": lambda: None}, ["say=<function", "one argument (too many", "such as print"]),
        ({"log": RunLog(), "tensorboard": "x"}, ["tensorboard= is given", "a RunLog: give"]),
        ({"checkpoints": True}, ["checkpoints=True", TYPE, "a folder or Checkpoints"]),
        ({"checkpoints": 5}, ["checkpoints=5", TYPE, "a folder or Checkpoints"]),
        ({"checkpoints": ""}, ["checkpoints=''", "is empty: give", "a folder or Checkpoints"]),
        ({"log": ""}, ["log=''", "is empty: give", "a file"]),
        ({"log": "/proc"}, ["log /proc is a folder", "give a file, such as /proc/run.jsonl"]),
        ({"log": "/none/run.jsonl"}, ["log /none/run.jsonl", "there is no folder /none"]),
        ({"tensorboard": __file__}, [f"tensorboard {__file__} is not a folder", "a name that is free"]),
        ({"trace": ""}, ["trace=''", "is empty: give", "a folder"]),
        ({"resume": "must"}, ["resume='must'", "needs checkpoints", "leave resume out"]),
        ({"report": True}, ["report=True", TYPE, "a file such as run.html"]),
        ({"report": "run.txt"}, ["report run.txt", "has the wrong suffix", "a name that ends in .html"]),
        ({"report": "/none/run.html"}, ["report /none/run.html", "there is no folder /none"]),
        ({"print_every": -1}, ["print_every=-1", "not a number of updates", "0 to print no losses"]),
        ({"print_every": True}, ["print_every=True", "not a number of updates", "0 to print no losses"]),
        ({"print_every": 0.5}, ["print_every=0.5", "not a number of updates", "0 to print no losses"]),
        ({"progress": "yes"}, ["progress='yes'", "not a bool", "give True or False"]),
        ({"title": None}, ["title=None", TYPE, "a text"]),
        ({"log": 3}, ["log=3", TYPE, "a file or a RunLog"]),
        ({"trace": 3}, ["trace=3", TYPE, "a folder or a Recording"]),
        ({"tensorboard": 3}, ["tensorboard=3", TYPE, "a folder"]),
        ({"resume": None}, ["resume=None", TYPE, "'auto', 'must', 'never' or the path"]),
        ({"notes": "mine"}, ["notes='mine'", TYPE, "such as {'seed': 3}"]),
        ({"notes": {"step": 3}}, ["notes have the name 'step'", TAKEN]),
        ({"notes": {"command": 3}}, ["notes have the name 'command'", TAKEN]),
        # the feed has two epochs of two updates
        ({"epochs": 3}, ["epochs=3 ends at the start of epoch 3", "made with epochs=2", "make it without epochs="]),
        ({"epochs": 2.5}, ["epochs=2.5 ends at example 6 of epoch 2", "make it without epochs="]),
        ({"updates": 5}, ["updates=5 ends at example 6 of epoch 2", "make it without epochs="]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_fit_is_given_is_refused_with_nothing_used_up(change, holds):
    step = shared_step()
    with Feed(normal(0, 2 * SIZE, D), step=step, micro_batch=B, epochs=2) as feed:
        state = step.init(weights())
        given = {"step": step, "state": state, "feed": feed, **change}
        FitResult.last = kept = FitResult(state, 3)
        with refused(*holds):
            fit(**given)
        assert not state.step.is_deleted()
        assert FitResult.last is kept


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (None, ["evaluate returned", "None: return figures by name"]),
        (0.5, ["evaluate returned", "0.5: return figures by name"]),
        ("good", ["evaluate returned", "'good': return figures by name"]),
        ({"accuracy": "good"}, ["evaluate returned", "'good' for 'accuracy'", "not one number: return"]),
        ({"accuracy": np.ones(2)}, ["evaluate returned", "array([1., 1.]) for 'accuracy'", "not one number: return"]),
        ({"accuracy": 1j}, ["evaluate returned", "1j for 'accuracy'", "not one number: return"]),
        ({"updates": 3}, ["figures have the name 'updates'", TAKEN]),
        ({"epoch": 3}, ["figures have the name 'epoch'", TAKEN]),
        ({"time": 3}, ["figures have the name 'time'", TAKEN]),
        ({3: 3}, ["figures have the name 3", "choose another"]),
    ],
)
def test_wrong_figures_are_refused_with_the_state_kept(found, holds):
    step = shared_step()
    with (
        Feed(normal(0, SIZE, D), step=step, micro_batch=B) as feed,
        pytest.raises(ValueError, match=holds[0]) as raised,
    ):
        fit(step, step.init(weights()), feed, evaluate=lambda state: found, say=Lines())
    assert not [text for text in holds if text not in str(raised.value)], raised.value
    assert FitResult.last is not None
    assert FitResult.last.updates == 1


def test_an_iterator_is_refused_for_a_second_epoch_before_the_first():
    step, rows = shared_step(), normal(0, 2 * SIZE, D)
    with Feed(iter(rows), items="examples", step=step, micro_batch=B) as feed:
        state = step.init(weights())
        with refused("cannot be repeated", "epoch 1", "a fresh iterator"):
            fit(step, state, feed, epochs=2)
        result = fit(step, state, feed, say=Lines())
    assert (result.updates, result.stopped) == (2, None)


def test_a_used_state_and_a_feed_of_another_step_or_mesh_are_refused():
    step, rows = shared_step(), normal(0, 2 * SIZE, D)
    first = step.init(weights())
    sizes: dict[str, Any] = {"micro_batch": B, "gradient_accumulation": M}
    with Feed(rows, step=step, micro_batch=B) as feed:
        state = fit(step, first, feed, say=Lines()).state
    feeds: list[tuple[Any, Any, list[str]]] = [
        (first, Feed(rows, step=step, micro_batch=B), ["an earlier call reused", "the state that it returned"]),
        (state, Feed(rows, mesh=make_mesh(1, 1), **sizes), ["mesh has 1 devices", "step's 2 devices", "make the feed"]),
        (state, Feed(rows, mesh=step.mesh, device_iterations=2, **sizes), ["=2, but the step 1", "make it with Feed"]),
    ]
    stream = Feed(lambda epoch: iter(rows), items="examples", step=step, micro_batch=B, epochs=1)
    feeds.append((state, stream, ["epochs=2 ends at the start of epoch 2", "made with epochs=1: make"]))
    for given, other, holds in feeds:
        with other, refused(*holds):
            fit(step, given, other, epochs=2)
    with refused("mesh= is given, and the step has one", "leave it out"):
        Feed(rows, step=step, mesh=step.mesh, micro_batch=B)
