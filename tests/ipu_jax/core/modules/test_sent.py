"""Test what stages of modules send past others, skips and tied weights, against whole models on one device."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ipu_jax import Pipeline, Stage
from ipu_jax.nn import ModuleStage, equinox_stage, gather_stages, linen_stage, nnx_stage
from support.dense import largest_relative_error
from support.refusals import refusals, refused

M, ROWS, D, WORDS = 4, 3, 6, 11


def cross_entropy(logits, microbatch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["label"]).mean()


# a language model whose embedding and logits share one table


class Block(nnx.Module):
    def __init__(self, seed):
        self.norm, self.up = nnx.RMSNorm(D, rngs=nnx.Rngs(0)), nnx.Linear(D, D, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return x + nnx.silu(self.up(self.norm(x)))


class Words(nnx.Module):
    """Returns the embeddings, and the table for the head."""

    def __init__(self, embed):
        self.embed = embed

    def __call__(self, tokens):
        return self.embed(tokens), self.embed.embedding[...]


class Head(nnx.Module):
    def __init__(self):
        self.norm = nnx.RMSNorm(D, rngs=nnx.Rngs(0))

    def __call__(self, x, table):
        return self.norm(x) @ table.T


class Tied(nnx.Module):
    """The whole model, as its author wrote it."""

    def __init__(self):
        self.embed = nnx.Embed(WORDS, D, rngs=nnx.Rngs(0))
        self.blocks, self.norm = nnx.List([Block(1), Block(2)]), nnx.RMSNorm(D, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


TOKENS = {
    "tokens": np.random.default_rng(0).integers(0, WORDS, (M, ROWS, 5)),
    "label": np.random.default_rng(1).integers(0, WORDS, (M, ROWS, 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ipus", "schedule"), [((0, 0, 1, 1), "1f1b"), ((0, 1, 2, 3), "zb-h1"), ((0, 1, 2, 0), "grouped")]
)
def test_a_tied_table_that_is_sent_learns_as_in_the_whole_model(ipus, schedule):
    tied = Tied()
    parts = [
        nnx_stage(Words(tied.embed), "words", ipu=ipus[0], inputs="tokens", sends=("table",)),
        nnx_stage(Block(1), "block 0", ipu=ipus[1]),
        nnx_stage(Block(2), "block 1", ipu=ipus[2]),
        nnx_stage(Head(), "head", ipu=ipus[3], takes=("table",), loss=cross_entropy),
    ]
    stages, params, _ = gather_stages(parts)
    pipeline = Pipeline(stages, schedule=schedule, gradient_accumulation=M)
    graph, whole = nnx.split(tied)
    whole: Any = whole

    def twin(whole):
        logits = nnx.merge(graph, whole)(TOKENS["tokens"])
        return cross_entropy(logits, TOKENS)

    def as_stages(whole):
        return {
            "words": {"embed": whole["embed"]},
            "block 0": whole["blocks"][0],
            "block 1": whole["blocks"][1],
            "head": {"norm": whole["norm"]},
        }

    pure = nnx.to_pure_dict
    loss, gradients = jax.jit(jax.value_and_grad(twin))(whole)
    actual, sharded = pipeline.value_and_grad(pipeline.shard(params), TOKENS)
    assert float(actual) == pytest.approx(float(loss), rel=1e-5)
    of_stages = {name: pure(tree) for name, tree in pipeline.unshard(sharded).items()}
    assert largest_relative_error(of_stages, as_stages(pure(gradients))) < 1e-5


def test_equinox_modules_send_and_take_examples():
    class Doubled(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return self.linear(x), 2 * x

    first = equinox_stage(Doubled(eqx.nn.Linear(D, D, key=jax.random.key(0))), "first", inputs="x", sends=("twice",))
    last = equinox_stage(lambda x, twice: x.sum() * twice, "last", takes=("twice",))
    x = jnp.ones((ROWS, D))
    out = first.stage.fn(first.params["first"], None, {"x": x})
    np.testing.assert_array_equal(out.skips["twice"], 2 * x)
    taken = last.stage.fn(None, out.y, {}, skips=out.skips)
    np.testing.assert_allclose(taken.y, out.y.sum(-1, keepdims=True) * 2 * x, rtol=1e-6)


# what is shared is refused


def nnx_parts():
    embed = nnx.Embed(WORDS, D, rngs=nnx.Rngs(0))
    return nnx_stage(Words(embed), "words"), nnx_stage(Words(embed), "head", ipu=1)


def nnx_statistics():
    norm = nnx.BatchNorm(D, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    return nnx_stage(norm, "words"), nnx_stage(norm, "head", ipu=1)


def equinox_parts():
    class Model(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self):
            embed = eqx.nn.Embedding(WORDS, D, key=jax.random.key(0))
            linear = eqx.nn.Linear(D, WORDS, use_bias=False, key=jax.random.key(0))
            self.shared = eqx.nn.Shared((embed, linear), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    embed, linear = Model().shared()
    return equinox_stage(embed, "words"), equinox_stage(linear, "head", ipu=1)


def linen_parts():
    params = nn.Embed(WORDS, D).init(jax.random.key(0), jnp.zeros(1, int))
    return linen_stage(nn.Embed(WORDS, D), params, "words"), linen_stage(nn.Embed(WORDS, D), params, "head", ipu=1)


def plain_parts():
    table = np.ones((WORDS, D), np.float32)
    stage = lambda name: Stage(lambda w, x, mb: x, params=name)
    return ModuleStage(stage("words"), {"words": {"w": table}}), ModuleStage(stage("head"), {"head": [table]})


@pytest.mark.parametrize(
    ("parts", "arrays"),
    [
        (nnx_parts, "params['words']['embed']['embedding'].value and params['head']['embed']['embedding'].value"),
        (nnx_statistics, "state['words']['mean'].value and state['head']['mean'].value"),
        (equinox_parts, "params['words'].weight and params['head'].weight"),
        (linen_parts, "params['words']['embedding'] and params['head']['embedding']"),
        (plain_parts, "params['words']['w'] and params['head'][0]"),
    ],
)
def test_an_array_that_two_stages_hold_is_refused(parts, arrays):
    there, here = arrays.split(" and ")
    holds = f"{there} of stage 'words' and {here} of stage 'head'", "the same array", "sends=('tied',)", "jnp.copy"
    made = parts()
    with refused(*holds):
        gather_stages(made)
    # even if all arrays of the parts are new ones, and the old ones are gone
    new = [dataclasses.replace(part, **mapped(part, lambda leaf: leaf * 2)) for part in made]
    stages = [part.stage for part in made]
    del made
    for call in (
        lambda: gather_stages(new),
        lambda: Pipeline(stages),
        lambda: Pipeline([dataclasses.replace(stages[0], ipu=1), stages[1]]),
    ):
        with refused(*holds):
            call()


def mapped(part: ModuleStage, fn: Any) -> Any:
    return {"params": jax.tree.map(fn, part.params), "state": jax.tree.map(fn, part.state)}


def test_two_weights_that_start_alike_are_two_if_one_is_copied_before_its_stage_is_made():
    copied = lambda tree: jax.tree.map(jnp.copy, tree)
    of_nnx, of_eqx = nnx.Embed(WORDS, D, rngs=nnx.Rngs(0)), eqx.nn.Embedding(WORDS, D, key=jax.random.key(0))
    of_linen = nn.Embed(WORDS, D)
    variables = of_linen.init(jax.random.key(0), jnp.zeros(1, int))
    copy_of_nnx = nnx.merge(nnx.graphdef(of_nnx), copied(nnx.state(of_nnx)))
    for parts in (
        (nnx_stage(of_nnx, "words"), nnx_stage(copy_of_nnx, "head", ipu=1)),
        (equinox_stage(of_eqx, "words"), equinox_stage(copied(of_eqx), "head", ipu=1)),
        (linen_stage(of_linen, variables, "words"), linen_stage(of_linen, copied(variables), "head", ipu=1)),
    ):
        assert len(Pipeline(gather_stages(parts)[0]).stages) == 2


def test_stages_of_one_array_in_one_group_are_tied():
    words, head = plain_parts()
    stages = [words.stage, dataclasses.replace(head.stage, params="words")]
    assert len(Pipeline(stages).stages) == 2


def pair_sending(module, *names):
    part = equinox_stage(module, "x", sends=names)
    return lambda: part.stage.fn(None, jnp.ones((2, 2)), None)


@refusals(
    (
        lambda: linen_stage(nn.Dense(2), {}, "x", sends=cast(Any, "first")),
        "sends='first'",
        "stage 'x'",
        "sends=('name',)",
    ),
    (pair_sending(lambda x: (x, x), "a", "b"), "stage 'x' returns a tuple of 2", "sends=('a', 'b')", "(y, a, b)"),
    (pair_sending(lambda x: x, "a"), "sends=('a',)", "return (y, a), or leave sends out"),
)
def test_skips_that_do_not_fit_are_refused(call, holds):
    with refused(*holds):
        jax.eval_shape(call)
