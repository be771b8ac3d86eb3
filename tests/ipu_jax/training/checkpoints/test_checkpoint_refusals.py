"""Test which folders, options, ways to resume and other trainings the checkpoints refuse by name."""

import functools
import sys
from pathlib import Path
from typing import Any

import optax
import pytest

from ipu_jax import Checkpoints, TrainOptions, make_train_step
from ipu_jax.io import CheckpointError
from ipu_jax.options import DynamicScale
from support import killed_saves, resumed
from support.killed_saves import step_of
from support.refusals import refusals, refused
from support.small_problems import product_loss, product_weights

NO_FUNCTION: Any = 3
NO_STATE: Any = {"w": 1}
PLAIN = "give numbers, strings, None, lists and dicts of these"
WEIGHTS = product_weights()


@functools.cache
def state() -> Any:
    return killed_saves.state_of(step_of(), 0, 0)


def made(folder: Any, **options: Any) -> Checkpoints:
    return Checkpoints(folder, step_of(), **options)


def a_file(at: Path) -> Path:
    path = at / "file"
    path.write_text("")
    return path


def closed(at: Path) -> Checkpoints:
    checkpoints = made(at)
    checkpoints.close()
    return checkpoints


def save(at: Path, *position: Any, **options: Any) -> None:
    with made(at) as checkpoints:
        checkpoints.save(state(), *position, **options, now=True)


def restore(at: Path, resume: Any) -> None:
    with made(at) as checkpoints:
        checkpoints.restore(state(), resume=resume)


@refusals(
    (lambda at: made(at, keep=0), "keep=0", "an int of at least 1"),
    (lambda at: made(at, every=0), "every=0", "an int of at least 1"),
    (lambda at: made(at, minutes=0), "minutes=0", "not a positive number", "such as 10"),
    (lambda at: made(at, timeout=float("inf")), "timeout=inf", "not a positive number", "such as 300"),
    (lambda at: made(at, on_save_error="ignore"), "on_save_error='ignore'", "'stop', 'continue'"),
    (lambda at: made(at, describes=3), "describes=3", "give plain data by name"),
    (lambda at: made(at, describes={"f": len}), "describes={'f': <built-in function len>}", PLAIN),
    (lambda at: Checkpoints(at, NO_FUNCTION), "not a training step", "make_train_step(...)"),
    *(
        (lambda _, folder=folder: made(folder), f"folder={folder!r}", "not a path", "such as 'runs/mnist'")
        for folder in ("", None, 3, "a\0b", Path("a\0b"))
    ),
    (lambda at: made(a_file(at)), "file' is not a folder", "a name that is free"),
    (lambda at: closed(at).lock(), "the checkpoints are closed", "`with` block"),
    (lambda at: closed(at).save(state()), "the checkpoints are closed", "`with` block"),
    (lambda at: made(at).save(NO_STATE), "state is a dict", "from step.init(params)"),
    (lambda at: made(at).due(NO_STATE), "state is a dict", "from step.init(params)"),
    (lambda at: made(at).restore(NO_STATE), "state is a dict", "from step.init(params)"),
    (lambda at: save(at, "feed"), "feed is a str", "give the Feed, or the result of its state()"),
    (lambda at: restore(at, "latest"), "resume='latest'", "'auto', 'must' nor 'never'", "/latest"),
    *(
        (lambda at, resume=resume: restore(at, resume), f"resume={resume!r}", "not a path", "'auto', 'must' or 'never'")
        for resume in ("", None, True)
    ),
    (lambda at: save(at, extra={"sizes": (1, 2)}), "extra={'sizes': (1, 2)}", "as {'sizes': [1, 2]}", "give lists"),
    (lambda at: save(at, {"source": object()}), "{'source': <object", PLAIN),
)
def test_what_checkpoints_are_given_is_refused(call, holds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state()
    with refused(*holds):
        call(tmp_path)


def test_without_orbax_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with refused("orbax.checkpoint cannot be imported", "pip install 'ipu-jax[checkpoints]'", error=ImportError):
        made(tmp_path)


def test_a_folder_that_no_user_can_read_is_refused(tmp_path):
    state()
    with refused("file/runs cannot be read", "[Errno 20] Not a directory", "this user can read", error=CheckpointError):
        restore(a_file(tmp_path) / "runs", "auto")


# other trainings


def trained(optimizer: Any = None, **options: Any) -> Any:
    return make_train_step(product_loss, optimizer or optax.adam(0.1), TrainOptions(**options))


AVERAGE = "no average of the weights: leave ema_decay out"


@pytest.mark.parametrize(
    ("other", "describes", "holds"),
    [
        (trained, {"data": "spirals"}, ["data 'rows'", "this run's data is 'spirals'", "resume with the same"]),
        (trained, {"data": "rows", "model": "mlp"}, ["model not given", "model is 'mlp'", "resume with the same"]),
        (
            lambda: trained(optax.sgd(0.1, momentum=0.9)),
            {"data": "rows"},
            ["no optimizer[0].trace['u']", "has optimizer[0].count, which", "the optimizer that it was saved with"],
        ),
        (lambda: trained(ema_decay=0.9), {"data": "rows"}, [AVERAGE]),
        (
            lambda: trained(loss_scale=DynamicScale()),
            {"data": "rows"},
            ["no scale, and this run has float32", "TrainOptions(loss_scale=DynamicScale())"],
        ),
        (
            lambda: trained(precision="16.16"),
            {"data": "rows"},
            ["params['u'] is float32[5, 3] in it, and bfloat16[5, 3] in this", "the precision that it was saved with"],
        ),
    ],
)
def test_another_training_is_refused_by_name(tmp_path, other, describes, holds):
    step = trained()
    with Checkpoints(tmp_path, step, describes={"data": "rows"}) as checkpoints:
        checkpoints.save(step.init(WEIGHTS), now=True)
    step = other()
    like = step.init(WEIGHTS)
    with Checkpoints(tmp_path, step, describes=describes) as checkpoints, refused(f"{tmp_path}/step-0 ", *holds):
        checkpoints.restore(like)


def test_a_model_of_other_groups_is_refused_by_name(tmp_path):
    one, other = (resumed.step_for(resumed.TOPOLOGIES["basic"], dropout=dropout) for dropout in (False, True))
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(resumed.first_state(one), now=True)
    cases = [
        (other, resumed.first_state(other), ["step-0 has no key, and this run has key<fry>", "must be random"]),
        (trained(), trained().init(WEIGHTS), ["has other weights: it has no", "that it was saved with"]),
    ]
    for step, like, holds in cases:
        with Checkpoints(tmp_path, step) as checkpoints, refused(*holds):
            checkpoints.restore(like)
