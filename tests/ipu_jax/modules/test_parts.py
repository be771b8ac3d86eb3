"""Test what the stages of all libraries have in common: what they read, their loss, and how they are gathered."""

import re
import subprocess
import sys

import pytest

from ipu_jax import ModuleStage, Stage, equinox_stage, gather_stages, nnx_stage
from ipu_jax.modules.parts import make_module_stage


def part_of(name="part", *, params=2.0, state=None, inputs=None, loss=None):
    """Return a stage whose module multiplies its arguments, and in training adds 1 to its state."""

    def call(params, state, args, key, *, training):
        y = params
        for arg in args:
            y = y * arg
        return y, None if state is None else state + training, None

    return make_module_stage(call, name, params, state, ipu=0, inputs=inputs, loss=loss, random=False, recompute="auto")


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [(None, 6.0), ("a", 10.0), (lambda x, mb: (x, mb["a"]), 30.0), (lambda x, mb: (), 2.0)],
)
def test_what_a_module_is_called_with(inputs, expected):
    stage = part_of(inputs=inputs).stage
    assert stage.fn(2.0, 3.0, {"a": 5.0}).y == expected


def test_a_micro_batch_may_be_a_tuple():
    assert part_of(inputs=lambda x, mb: (mb[1],)).stage.fn(2.0, None, (3.0, 5.0)).y == 10.0


def test_the_loss_follows_the_module_in_training_and_evaluation():
    part = part_of(state=1.0, inputs="a", loss=lambda y, mb: (y - mb["b"], {"y": y}))
    for function, state in ((part.stage.function("training"), 2.0), (part.stage.function("evaluation"), None)):
        out = function(2.0, None, {"a": 5.0, "b": 3.0}, state=1.0)
        assert (out.y, out.state) == ((7.0, {"y": 10.0}), state)


def test_parts_are_gathered_in_order():
    plain = ModuleStage(Stage(lambda w, x, mb: x, params="plain"), {"plain": 1.0})
    stages, params, state = gather_stages(iter([part_of("b"), plain, part_of("a", params=3.0, state=4.0)]))
    assert [stage.name for stage in stages] == ["b", "plain", "a"]
    assert (params, state) == ({"b": 2.0, "plain": 1.0, "a": 3.0}, {"a": 4.0})
    assert gather_stages([part_of()])[2] is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: part_of(""), "name='' is not the name of a stage: give a string such as 'encoder'"),
        (lambda: part_of(loss=1), "loss=1 of stage 'part' is not callable: give a function of (y, microbatch)"),
        (
            lambda: part_of(inputs=3),
            "inputs=3 of stage 'part' is neither a leaf of the micro-batch nor a function: give a name such as "
            "'images', a function of (x, microbatch) that returns a tuple, or None for the stage before",
        ),
        (
            lambda: part_of().stage.fn(2.0, None, {"a": 1}),
            "stage 'part' is the first one, and no stage before it gives it an input: say what its module reads of the "
            "micro-batch, such as inputs='images' or inputs=lambda x, microbatch: (microbatch,)",
        ),
        (
            lambda: part_of(inputs="c").stage.fn(2.0, None, {"b": 1, "a": 1}),
            "stage 'part' reads inputs='c' of the micro-batch, which is ['a', 'b']: give one of its names, or a "
            "function of (x, microbatch)",
        ),
        (
            lambda: part_of(inputs="c").stage.fn(2.0, None, (1, 2)),
            "stage 'part' reads inputs='c' of the micro-batch, which is tuple: give one of its names, or a function of "
            "(x, microbatch)",
        ),
        (
            lambda: part_of(inputs=lambda x, mb: x).stage.fn(2.0, 1.0, {}),
            "inputs of stage 'part' returned float: return the tuple of the module's arguments, such as (x,)",
        ),
        (
            lambda: gather_stages([part_of(), part_of()]),
            "two stages have params of the name 'part': give each stage another name",
        ),
        (
            lambda: gather_stages([part_of(state=1.0), ModuleStage(Stage(abs), state={"part": 1})]),
            "two stages have state of the name 'part': give each stage another name",
        ),
        (
            lambda: gather_stages([Stage(abs, name="plain")]),  # pyright: ignore[reportArgumentType]
            "is not a ModuleStage: give what linen_stage, nnx_stage or equinox_stage returned, or "
            "ModuleStage(Stage(...), params={group: weights})",
        ),
    ],
)
def test_mistakes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        wrong()


def test_neither_library_is_loaded_before_it_is_needed():
    code = "import sys, ipu_jax; print(sorted({'flax', 'equinox'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("make", "module", "extra"), [(nnx_stage, "flax.nnx", "flax"), (equinox_stage, "equinox", "equinox")]
)
def test_a_missing_library_is_named_with_its_extra(make, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as error:
        make(lambda x: x, "body")
    assert str(error.value) == f"{module} cannot be imported: pip install 'ipu-jax[{extra}]'"
