"""Functions that run the same layers several times, or layers side by side, as their authors would write them.

Each returns an `Example`, and has 16 layers for each kind of weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .example import VOCAB, Example, normal

LAYERS, D, ROWS, LENGTH = 16, 16, 4, 7
RNG = np.random.default_rng(0)


def listed(count: int = LAYERS, width: int = D) -> list[Any]:
    return [{"up": normal(RNG, width, 2 * width), "down": normal(RNG, 2 * width, width)} for _ in range(count)]


def stacked(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def norm(x: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def layer(x: Any, p: Any) -> Any:
    return x + jnp.tanh(norm(x) @ p["up"]) @ p["down"]


def looped(layers: Any, x: Any) -> Any:
    return functools.reduce(layer, layers, x)


def scanned(layers: Any, x: Any) -> Any:
    return lax.scan(lambda x, p: (layer(x, p), None), x, layers)[0]


def agreement(a: Any, b: Any, scale: Any = 5.0) -> Any:
    """Return the contrastive loss of two sets of rows."""
    a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T * scale)))


def two(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=(ROWS, *shape)).astype(np.float32) for name in ("x", "y")}


def pairs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return two(rng, D)


def preferences(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32) for name in ("chosen", "rejected")}


def likelihood(table: Any, x: Any, tokens: Any) -> Any:
    logits = jax.nn.log_softmax(norm(x) @ table.T)
    return jnp.take_along_axis(logits, tokens[:, 1:, None], -1).sum((1, 2))


def preference_loss(policy: Any, reference: Any, mb: Any) -> Any:
    """Return the loss of direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)."""
    margin = policy(mb["chosen"]) - reference(mb["chosen"]) - policy(mb["rejected"]) + reference(mb["rejected"])
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * margin))


def lora(count: int = LAYERS) -> list[Any]:
    return [{"a": normal(RNG, D, 2), "b": normal(RNG, 2, 2 * D)} for _ in range(count)]


def adapted(x: Any, p: Any) -> Any:
    base, low = p
    h = norm(x)
    return x + jnp.tanh(h @ base["up"] + h @ low["a"] @ low["b"]) @ base["down"]


def dpo_of_a_list() -> Example:
    """The reference is the frozen base, without adapters."""
    params = {"table": normal(RNG, VOCAB, D), "base": listed(), "lora": lora()}

    def loss(params, mb):
        table, base = lax.stop_gradient((params["table"], params["base"]))
        embed = lambda tokens: table[tokens[:, :-1]]
        both = [*zip(base, params["lora"], strict=True)]
        policy = lambda tokens: likelihood(table, functools.reduce(adapted, both, embed(tokens)), tokens)
        return preference_loss(policy, lambda tokens: likelihood(table, looped(base, embed(tokens)), tokens), mb)

    return Example(loss, params, preferences)


def siamese_list() -> Example:
    return Example(lambda p, mb: agreement(looped(p, mb["x"]), looped(p, mb["y"])), listed(), pairs)


def siamese_stack() -> Example:
    return Example(lambda p, mb: agreement(scanned(p, mb["x"]), scanned(p, mb["y"])), stacked(listed()), pairs)


def siamese_under_checkpoints() -> Example:
    """A `jax.checkpoint` is around each tower as a whole."""
    tower = jax.checkpoint(looped)
    return Example(lambda p, mb: agreement(tower(p, mb["x"]), tower(p, mb["y"])), listed(), pairs)


def two_views_with_dropout() -> Example:
    """One input is seen twice, under two keys."""

    def tower(params, x, key):
        for p, own in zip(params, jax.random.split(key, LAYERS), strict=True):
            x = layer(x * jax.random.bernoulli(own, 0.9, x.shape) / 0.9, p)
        return x

    def loss(params, mb, key):
        one, other = jax.random.split(key)
        return agreement(tower(params, mb["x"], one), tower(params, mb["x"], other))

    return Example(loss, listed(), pairs, takes_key=True)


def batch_norm_on_both() -> Example:
    """The second input updates the averages that the first one has left."""

    def tower(params, averages, x):
        new = []
        for p, old in zip(params, averages, strict=True):
            h = x @ p["w"]
            new.append(0.9 * old + 0.1 * h.mean(0))
            x = x + jnp.tanh((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5) * p["gain"])
        return x, new

    def loss(params, state, mb):
        a, state = tower(params, state, mb["x"])
        b, state = tower(params, state, mb["y"])
        return agreement(a, b), lax.stop_gradient(state)

    params = [{"w": normal(RNG, D, D), "gain": np.ones(D, np.float32)} for _ in range(LAYERS)]
    return Example(loss, params, pairs, state=[np.zeros(D, np.float32)] * LAYERS)


def moved(old: Any, new: Any) -> Any:
    return jax.tree.map(lambda o, n: 0.99 * o + 0.01 * lax.stop_gradient(n), old, new)


def moving_target(run: Any, layers: Any, *, first: bool) -> Example:
    """Return a contrastive loss against an average of the weights, which moves first, or last."""

    def loss(params, state, mb):
        target = moved(state, params) if first else state
        value = agreement(run(params, mb["x"]), lax.stop_gradient(run(target, mb["y"])))
        return value, target if first else moved(state, params)

    return Example(loss, layers, pairs, state=jax.tree.map(lambda leaf: 0.9 * leaf, layers))


def target_of_a_list() -> Example:
    return moving_target(looped, listed(), first=False)


def target_of_a_list_that_moves_first() -> Example:
    return moving_target(looped, listed(), first=True)


def target_of_a_stack() -> Example:
    return moving_target(scanned, stacked(listed()), first=False)


def target_of_a_stack_that_moves_first() -> Example:
    return moving_target(scanned, stacked(listed()), first=True)


def distilled(teacher: Any, student: Any, run_teacher: Any, run_student: Any) -> Example:
    def loss(params, mb):
        wanted = lax.stop_gradient(run_teacher(params["teacher"], jnp.tile(mb["x"], 2)))
        return jnp.mean((run_student(params["student"], mb["x"]) @ params["head"] - wanted) ** 2)

    params = {"teacher": teacher, "student": student, "head": normal(RNG, D, 2 * D)}
    return Example(loss, params, pairs)


def teacher_and_student() -> Example:
    return distilled(listed(width=2 * D), listed(), looped, looped)


def teacher_in_a_scan() -> Example:
    return distilled(stacked(listed(width=2 * D)), listed(), scanned, looped)


def clip() -> Example:
    """A tower for images and one for texts; images are three times as long."""

    def loss(params, mb):
        means = [looped(params[name], mb[name]).mean(1) for name in ("image", "text")]
        return agreement(means[0], means[1], jnp.exp(params["scale"]))

    def draw(rng):
        return {
            name: rng.normal(size=(ROWS, length, D)).astype(np.float32) for name, length in (("image", 9), ("text", 3))
        }

    return Example(loss, {"image": listed(), "text": listed(), "scale": np.float32(1)}, draw)


def gan() -> Example:
    """The critic runs on real rows first, and then on the generator's."""

    def loss(params, mb):
        real = looped(params["critic"], mb["x"]).mean(-1)
        fake = looped(params["critic"], looped(params["generator"], mb["y"])).mean(-1)
        return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake))

    return Example(loss, {"generator": listed(), "critic": listed()}, pairs)


def forth_and_back() -> Example:
    """The layers run in one order on one input, and in the other on another."""
    return Example(lambda p, mb: agreement(looped(p, mb["x"]), looped(p[::-1], mb["y"])), listed(), pairs)


SHARES = {
    dpo_of_a_list: 4,
    **dict.fromkeys((siamese_list, siamese_stack, siamese_under_checkpoints, two_views_with_dropout), 2),
    **dict.fromkeys((batch_norm_on_both, target_of_a_list, target_of_a_list_that_moves_first), 2),
    **dict.fromkeys((target_of_a_stack, target_of_a_stack_that_moves_first), 2),
    **dict.fromkeys((teacher_and_student, teacher_in_a_scan, clip), 3),
}
"""Functions in which another order divides the weights evenly, and how many arrays a boundary sends."""
