"""Test what the stages of all libraries have in common: what they read, their loss, and how they are gathered."""

import subprocess
import sys
from typing import Any, cast

import equinox as eqx
import flax.linen as nn
import pytest
from flax import nnx

from ipu_jax import Stage
from ipu_jax.core.modules.parts import make_module_stage
from ipu_jax.nn import ModuleStage, equinox_stage, gather_stages, linen_stage, nnx_stage
from support.refusals import refusals, refused


def part_of(name="part", *, params=2.0, state=None, inputs=None, loss=None):
    """Return a stage whose module multiplies its arguments, and in training adds 1 to its state."""

    def call(params, state, args, key, *, training):
        y = params
        for arg in args:
            y = y * arg
        return y, None if state is None else state + training, None

    return make_module_stage(call, name, params, state, 0, inputs, loss, False, "auto", (), ())


@pytest.mark.parametrize(
    ("inputs", "expected"), [(None, 6.0), ("a", 10.0), (lambda x, mb: (x, mb["a"]), 30.0), (lambda x, mb: (), 2.0)]
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


def fn_of(part, x, microbatch):
    return lambda: part.stage.fn(2.0, x, microbatch)


PART = part_of()
GIVEN = "give one of its names, or a function of (x, microbatch)"


@refusals(
    (lambda: part_of(""), "name=''", "not the name of a stage", "a string such as 'encoder'"),
    (lambda: part_of(loss=1), "loss=1 of stage 'part'", "callable", "a function of (y, microbatch)"),
    (lambda: part_of(inputs=3), "inputs=3 of stage 'part'", "neither a leaf", "a name such as 'images'", "or None"),
    (fn_of(PART, None, {"a": 1}), "stage 'part' is the first one", "inputs='images' or inputs=lambda x, microbatch"),
    (fn_of(part_of(inputs="c"), None, {"b": 1, "a": 1}), "stage 'part' reads inputs='c'", "is ['a', 'b']", GIVEN),
    (fn_of(part_of(inputs="c"), None, (1, 2)), "stage 'part' reads inputs='c'", "is tuple", GIVEN),
    (fn_of(part_of(inputs=lambda x, mb: x), 1.0, {}), "stage 'part' returned float", "the tuple", "such as (x,)"),
    (lambda: gather_stages([PART, PART]), "params of the name 'part'", "another name"),
    (
        lambda: gather_stages([part_of(state=1.0), ModuleStage(Stage(abs), state={"part": 1})]),
        "state of the name 'part'",
        "another name",
    ),
    (lambda: gather_stages(cast(Any, [Stage(abs, name="plain")])), "'plain'", "not a ModuleStage", "{group: weights}"),
    (lambda: linen_stage(lambda x: x, {}, "x"), "module=function", "a flax.linen module, with init and apply"),
    (lambda: linen_stage(nn.Dense(1), cast(Any, (1, 2)), "x"), "stage 'x' are tuple", "module.init(key, inputs)"),
    (lambda: nnx_stage(lambda x: x, "x"), "module=function", "an nnx.Module", "for flax.linen use linen_stage"),
    (lambda: linen_stage(cast(Any, nn.Dense), {}, "x"), "module=Dense of stage 'x'", "a class", "give an instance"),
    (lambda: nnx_stage(nnx.Linear, "x"), "module=Linear of stage 'x'", "a class", "give an instance"),
    (lambda: equinox_stage(eqx.nn.Linear, "x"), "module=Linear of stage 'x'", "a class", "give an instance"),
    (lambda: equinox_stage(1, "x"), "module=int of stage 'x'", "callable", "an Equinox module"),
    (lambda: equinox_stage(eqx.nn.Dropout(), "x", state={}), "state=dict of stage 'x'", "eqx.nn.State", "the second"),
)
def test_mistakes_are_refused(call, holds):
    with refused(*holds):
        call()


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
