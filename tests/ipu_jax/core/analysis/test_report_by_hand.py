"""Test every field of a report by arithmetic from shapes, for a model with everything that a stage may have.

embed (all IPUs, columns)  ->  first (IPU 0; aux)  ->  second (IPU 1; state)  ->  head (all IPUs, columns; aux)
x (N, K) -> (N, D)             (N, D) -> (N, E)        (N, E) -> (N, G)           (N, G) -> loss
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh

N, K, D, E, G, V = 3, 6, 8, 10, 7, 9  # V columns on 2 IPUs: 5 and 4
M = 2
LAYERS = 3
FLOAT = 4  # bytes


def embed(w, x, mb):
    return lax.all_gather(mb @ w, "ipu", axis=1, tiled=True)


def first(w, x, mb):
    y = x @ w
    return Outputs(y, aux={"sum": y.sum(), "rows": y.sum(1)})


def second(w, x, mb, *, state):
    return Outputs(x @ w, state={"seen": state["seen"] + 1, "kept": state["kept"]})


def head(w, x, mb):
    y = x @ w
    return lax.psum(y.sum(), "ipu"), {"count": jnp.int32(N)}


def pipeline_of(schedule: str) -> Any:
    stages = [
        Stage(embed, params="embed", ipu=ALL_IPUS),
        Stage(first, params="first", ipu=0),
        Stage(second, params="second", ipu=1, state="s"),
        Stage(head, params="head", ipu=ALL_IPUS, reference=lambda w, x, mb: (x @ w).sum()),
    ]
    columns = PartitionSpec(None, "ipu")
    options: Any = {"schedule": schedule, "gradient_accumulation": M, "specs": {"embed": columns, "head": columns}}
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), **options)
    shapes = {"embed": (K, D), "first": (D, E), "second": (E, G), "head": (G, V)}
    params = pipeline.shard({name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    state = pipeline.shard_state({"s": {"seen": np.zeros(3, np.int32), "kept": np.zeros(2, jnp.bfloat16)}})
    return pipeline, params, jax.ShapeDtypeStruct((M, N, K), "float32"), state


# FLOPs of one micro-batch on one IPU. F, and the parts of the backward for the input and for the weights.
EMBED = {"F": 2 * N * K * (D // 2), "B": 2 * N * K * (D // 2)}  # x is the batch: no gradient of it
FIRST = {"F": 2 * N * D * E + N * E + N * E, "B": 2 * N * D * E, "W": 2 * N * D * E}  # with both sums of the aux
SECOND = {"F": 2 * N * E * G + 3, "B": 2 * N * E * G, "W": 2 * N * E * G}  # with three counters of the state
HEAD = {"F": 2 * N * G * 5 + N * 5, "B": 2 * 2 * N * G * 5}  # 5 columns, one of padding on IPU 1


@pytest.mark.parametrize(("schedule", "depths"), [("grouped", (2, 1)), ("zb-h1", (2, 2))])
def test_every_field_by_hand(schedule, depths):
    pipeline, params, batch, state = pipeline_of(schedule)
    found = pipeline.report(params, batch, state, compile=False)
    assert (found.schedule, found.micro_batches, len(found.ipus), found.temporary) == (schedule, M, 2, None)
    one, two = found.ipus
    split = schedule == "zb-h1"
    # the layers are in one slot, as long as the larger of them; the shards of both ends have their own
    held = FLOAT * (D * E + K * D // 2 + G * 5)
    assert (one.weights, one.padding) == (held, 0)
    assert (two.weights, two.padding) == (FLOAT * (E * G + K * D // 2 + G * 4), FLOAT * (D * E - E * G + G))
    for part in (one, two):
        assert part.gradients == part.accumulators == held == part.weights + part.padding
        assert part.state == 3 * 4 + 2 * 2
        assert part.batch == FLOAT * M * N * K
    # each layer keeps its input; the embedding's is the batch, a head's B follows its F at once
    inputs = FLOAT * N * D, FLOAT * N * E
    # W needs the cotangent of y that B had: of one micro-batch on IPU 0 (1B0 1W0 1B1), of two on IPU 1 (2B0 2B1)
    cuts = (FLOAT * N * E, 2 * FLOAT * N * G) if split else (0, 0)
    assert (one.stash, two.stash) == tuple(depth * x + cut for depth, x, cut in zip(depths, inputs, cuts, strict=True))
    # the buffers of the scan: each kind is as long as on the IPU that needs the most of it
    assert found.stash == max(d * x for d, x in zip(depths, inputs, strict=True)) + max(cuts)
    # y and dx of each boundary; between the IPUs as made and as received; the loss; M aux
    assert found.channels == FLOAT * (2 * N * D + 2 * 2 * N * E + 2 * N * G) + FLOAT + M * FLOAT * (1 + N + 1)
    assert found.sums == 0
    # the gradient of a layer's weights, and its input, copied out of the stash for the product; for W, dy as well
    dy = (N * E, N * G) if split else (0, 0)
    assert one.working_set == FLOAT * (N * D + D * E + dy[0])
    assert two.working_set == FLOAT * (N * E + E * G + dy[1])
    assert found.working_set == max(one.working_set, two.working_set)
    assert found.predicted_temporary == found.stash + found.channels + found.working_set
    own = (FIRST, SECOND)
    for part, layer in zip((one, two), own, strict=True):
        assert part.flops == M * (sum(EMBED.values()) + sum(layer.values()) + sum(HEAD.values()))
        # y or dx to the neighbour; x of the head to all, and the parts of its dx; the embedding sends its dy itself
        assert part.sent == FLOAT * (N * E + 2 * N * G)
        assert part.idle == pytest.approx(1 - part.flops / makespan(schedule))


def makespan(schedule: str) -> float:
    """Return the sum of the phases in the picture of the schedule, each as long as its busiest IPU."""
    b1, b2 = FIRST["B"] + FIRST["W"], SECOND["B"] + SECOND["W"]
    f, g, whole_head = FIRST["F"], SECOND["F"], HEAD["F"] + HEAD["B"]
    if schedule == "grouped":
        # IPU 0  0F0 1F0 | 0F1 1F1 3F0 3B0     | 3F1 3B1 1B0 0B0     | 1B1 0B1
        # IPU 1  0F0     | 0F1 2F0 3F0 3B0 2B0 | 2F1 3F1 3B1 2B1 0B0 | 0B1
        entries = 2 * (EMBED["F"] + EMBED["B"])
        return entries + 2 * whole_head + f + max(f, g) + b2 + g + max(b1, b2) + b1
    # IPU 0  0F0 1F0 | 0F1 1F1 3F0 3B0 |     | 1B0 3F1 3B1 0B0 | 1W0 | 1B1 0B1 | 1W1
    # IPU 1  0F0     | 0F1 2F0 3F0 3B0 | 2B0 | 2F1 3F1 3B1 0B0 | 2B1 | 2W0 0B1 | 2W1
    ends = 2 * (EMBED["F"] + EMBED["B"] + whole_head)
    work = f + max(f, g) + SECOND["B"] + max(FIRST["B"], g) + max(FIRST["W"], SECOND["B"])
    return ends + work + max(FIRST["B"], SECOND["W"]) + max(FIRST["W"], SECOND["W"])


# half types inside a stage

X, H = 2 * N * D, 2 * N * E  # bytes of a half input, and of what is between the products
DOTS, EVERYTHING = jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable


def half_inside(w, x, mb):
    """Compute two products in a half type, of weights in float32."""
    h = (mb if x is None else x).astype("bfloat16") @ w["up"].astype("bfloat16")
    return (jnp.sin(h) @ w["down"].astype("bfloat16")).astype("float32")


def half_layers(w, x, mb):
    return lax.scan(lambda h, layer: (half_inside(layer, h, None), None), mb if x is None else x, w)[0]


@pytest.mark.parametrize(
    ("fn", "recompute", "first", "second"),
    [
        # the half input, sin(h) and cos(h)
        (half_inside, "none", X + 2 * H, X + 2 * H),
        (half_inside, EVERYTHING, X + 2 * H, X + 2 * H),
        # h, from which sin and cos follow; the first stage's half input follows from the batch
        (half_inside, "auto", H, X + H),
        # the results of products, and the input, which is float32
        (half_inside, DOTS, H, 2 * X + H),
        (half_inside, "all", 0, 2 * X),
        # per layer h and the half input
        (half_layers, "auto", LAYERS * (X + H), LAYERS * (X + H)),
        (half_layers, DOTS, LAYERS * (X + H), LAYERS * (X + H) + 2 * X),
        (half_layers, "all", 0, 2 * X),
    ],
)
def test_no_half_copy_of_the_weights_is_stashed(fn, recompute, first, second):
    """The copies follow from the weights alone, of which there is one for all micro-batches."""
    stages = [Stage(fn, params=name, ipu=k, recompute=recompute) for k, name in enumerate("ab")]
    stages.append(Stage(lambda p, x, mb: jnp.mean(x), ipu=1))
    pipeline = Pipeline(stages, gradient_accumulation=M, schedule="gpipe")
    lead = () if fn is half_inside else (LAYERS,)
    weights = {"up": np.ones((*lead, D, E), np.float32), "down": np.ones((*lead, E, D), np.float32)}
    params = pipeline.shard({name: weights for name in "ab"})
    found = pipeline.report(params, jax.ShapeDtypeStruct((M, N, D), "float32"), compile=False)
    assert [part.stash for part in found.ipus] == [M * first, M * second]  # gpipe keeps all micro-batches


# keys


def noisy(w, x, mb, *, key):
    """Dropout by two keys of the stage's one."""
    one, two = jax.random.split(key)
    h = jnp.tanh((mb if x is None else x) @ w)
    return h * jax.random.bernoulli(one, 0.5, h.shape) * jax.random.bernoulli(two, 0.5, h.shape)


def noisy_pipeline(recompute: Any, fn: Any = noisy, **options: Any) -> Any:
    stages = [Stage(fn, params=name, ipu=k, random=True, recompute=recompute) for k, name in enumerate("ab")]
    pipeline = Pipeline([*stages, Stage(lambda p, x, mb: jnp.mean(x), ipu=1)], gradient_accumulation=M, **options)
    params = pipeline.shard({name: np.ones((D, D), np.float32) for name in "ab"})
    return pipeline, params, np.ones((M, N, D), np.float32)


def test_a_key_that_is_folded_again_is_not_kept():
    pipeline, params, batch = noisy_pipeline("all", schedule="gpipe")
    found = pipeline.report(params, batch, key=jax.random.key(0), compile=False)
    assert [part.stash for part in found.ipus] == [0, M * FLOAT * N * D], (
        "a stage's input; the first one's is the batch"
    )


def noisy_layers(w, x, mb, *, key):
    """Each layer is recomputed and has a key of its own, so the scan keeps its keys."""

    @jax.checkpoint
    def layer(h, key):
        return jnp.tanh(h @ w) * jax.random.bernoulli(key, 0.5, h.shape), None

    return lax.scan(layer, mb if x is None else x, jax.random.split(key, LAYERS))[0]


def test_keys_that_are_kept_are_counted_by_their_data():
    stash = {}
    for impl in ("threefry2x32", "rbg"):
        pipeline, params, batch = noisy_pipeline("none", noisy_layers, schedule="gpipe")
        found = pipeline.report(params, batch, key=jax.random.key(0, impl=impl), compile=False)
        stash[impl] = [part.stash for part in found.ipus]
    # per layer its input and its key, of 2 or 4 words
    assert stash["threefry2x32"] == [M * LAYERS * (FLOAT * N * D + 8)] * 2
    assert stash["rbg"] == [M * LAYERS * (FLOAT * N * D + 16)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_a_pipeline_with_keys_is_checked_trained_and_reported(recompute):
    pipeline, params, batch = noisy_pipeline(recompute, ipu_memory=900e6)
    key = jax.random.key(1)
    loss, _ = pipeline.value_and_grad(params, batch, key=key)  # the check comes first, and warns of nothing
    assert np.isfinite(loss)
    shape = jax.eval_shape(lambda: jax.random.key(1))
    predicted, compiled = (pipeline.report(params, batch, key=k, compile=k is shape) for k in (key, shape))
    assert compiled.temporary is not None
    assert predicted.ipus == compiled.ipus
    tight, params, batch = noisy_pipeline(recompute, ipu_memory=100)
    with pytest.warns(UserWarning, match=r"^IPU \d needs .* more than ipu_memory=100 B"):
        jax.eval_shape(tight.value_and_grad, params, batch, None, key)


def test_a_batch_that_holds_keys_is_counted_by_their_data():
    stage = Stage(lambda w, x, mb: jnp.mean(mb["x"] @ w * jax.random.uniform(mb["key"])), params="w")
    pipeline = Pipeline([stage], gradient_accumulation=M, ipu_memory=900e6)
    params = pipeline.shard({"w": np.ones((D, D), np.float32)})
    batch = {"x": np.ones((M, N, D), np.float32), "key": jax.random.split(jax.random.key(0), M)}
    pipeline.value_and_grad(params, batch)
    assert pipeline.report(params, batch, compile=False).ipus[0].batch == M * (FLOAT * N * D + 8)
