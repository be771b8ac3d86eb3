"""Test what `debug_sharding` prints, word for word, and that it changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharded_ops import debug_sharding, reduce_to_all
from support.harness import on_ipus

debug_x = functools.partial(debug_sharding, name="x")


@pytest.fixture
def printed(capsys):
    """Return the lines printed since the last call, forward before backward, since XLA may run either first."""

    def lines() -> list[str]:
        jax.effects_barrier()
        return sorted(capsys.readouterr().out.splitlines(), key=lambda line: "backward" in line)

    return lines


ALIKE, DIFFERS = "the same on all IPUs", "differs between IPUs"


def lines(direction, array, *figures, replica=""):
    """Return the line of each IPU, by its least, largest and mean value."""
    told = ["min {}, max {}, mean {}".format(*of_ipu) for of_ipu in figures]
    return [f"x, {direction}, {replica}ipu {ipu} of {len(told)}: {array}, {text}" for ipu, text in enumerate(told)]


@pytest.mark.parametrize(("typed", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)])
def test_forward_and_backward_of_shards(typed, dtype, printed):
    def loss(x):
        return reduce_to_all(jnp.sum(debug_x(x) ** 2))

    sharded = on_ipus(loss, 4, P("ipu"), P(), typed)
    dx = jax.grad(sharded)(jnp.arange(8, dtype=dtype).reshape(4, 2))

    np.testing.assert_array_equal(dx, 2 * np.arange(8).reshape(4, 2))
    array = f"{dtype.__name__}[1,2], {DIFFERS}"
    assert printed() == [
        *lines("forward", array, (0, 1, 0.5), (2, 3, 2.5), (4, 5, 4.5), (6, 7, 6.5)),
        *lines("backward", array, (0, 2, 1), (4, 6, 5), (8, 10, 9), (12, 14, 13)),
    ]


@pytest.mark.parametrize("typed", [True, False])
def test_the_cotangent_of_what_all_hold_is_whole_or_in_parts(typed, printed):
    """With x the same on all IPUs and jax.grad outside, each IPU has the gradient if typed, half of it if untyped."""
    sharded = on_ipus(lambda x: jnp.sum(debug_x(x) ** 2), 2, P(), P(), typed)
    np.testing.assert_array_equal(jax.grad(sharded)(jnp.array([3.0])), [6])
    gradient, array = 6 if typed else 3, f"float32[1], {ALIKE}"
    assert printed() == [*lines("forward", array, *[(3, 3, 3)] * 2), *lines("backward", array, *[(gradient,) * 3] * 2)]


@pytest.mark.parametrize("typed", [True, False])
def test_differentiated_inside(typed, printed):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(debug_x(x) ** 2))(x)

    np.testing.assert_array_equal(on_ipus(gradient, 2, P("ipu"), P("ipu"), typed)(jnp.array([1.0, 2.0])), [2, 4])
    array = f"float32[1], {DIFFERS}"
    assert printed() == [
        *lines("forward", array, (1, 1, 1), (2, 2, 2)),
        *lines("backward", array, (2, 2, 2), (4, 4, 4)),
    ]


@pytest.mark.parametrize(
    ("x", "y", "alike"),
    [
        (np.array([1, 2, 3], np.float32), np.array([1, 2, 3], np.float32), True),
        (np.array([0, 0, 1], np.float32), np.array([0, 1, 0], np.float32), False),
        (np.array([1.0, 1.0, -1.0], np.float32), np.array([-1.0, 1.0, 1.0], np.float32), False),
        (np.array([0, 0, 0], np.float32), np.array([0, 0, -0.0], np.float32), False),
        (np.array([np.nan, 2, 3], np.float32), np.array([np.nan, 2, 3], np.float32), True),
        (np.array([5, 6, 7], np.int8), np.array([5, 6, 7], np.int8), True),
        (np.array([True, False, True]), np.array([True, True, False]), False),
        (np.array([1, 2, 3], jnp.bfloat16), np.array([1, 2, 3.015625], jnp.bfloat16), False),
    ],
)
def test_a_difference_of_bits_or_places_is_seen(x, y, alike, printed):
    on_ipus(debug_x, 2, P("ipu"), P("ipu"))(np.concatenate([x, y])).block_until_ready()
    assert [(ALIKE in line, DIFFERS in line) for line in printed()] == [(alike, not alike)] * 2


def test_the_mean_of_a_half_type_is_not_rounded_to_it(printed):
    on_ipus(debug_x, 2, P("ipu"), P("ipu"))(jnp.array([256, 258, 0, 1], jnp.bfloat16)).block_until_ready()
    assert printed() == lines("forward", f"bfloat16[2], {DIFFERS}", (256, 258, 257), (0, 1, 0.5))


def test_nan_and_empty_values_show(printed):
    on_ipus(debug_x, 2, P("ipu"), P("ipu"))(jnp.array([1.0, jnp.nan, 3.0, 4.0])).block_until_ready()
    assert printed() == lines("forward", f"float32[2], {DIFFERS}", ("nan",) * 3, (3, 4, 3.5))
    # The second result is needed because jax does not run a program with empty results only.
    both = on_ipus(lambda x, y: (debug_x(x), y), 2, P("ipu"), P("ipu"))
    jax.block_until_ready(both(jnp.zeros((2, 0)), jnp.zeros(2)))
    assert printed() == [f"x, forward, ipu {ipu} of 2: float32[1,0], the same on all IPUs, empty" for ipu in (0, 1)]


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_integers_inside_a_gradient(typed, printed):
    def picked(table, ids):
        return reduce_to_all(table[debug_x(ids)].sum())

    sharded = on_ipus(picked, 2, (P("ipu"), P()), P(), typed)
    np.testing.assert_array_equal(jax.grad(sharded)(jnp.arange(4.0), jnp.array([1, 1])), [0, 2, 0, 2])
    assert printed() == lines("forward", f"int32[2], {ALIKE}", *[(1, 1, 1)] * 2)


@pytest.mark.parametrize("typed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_replica_prints_its_own_lines(typed, printed):
    mesh = jax.make_mesh((2, 2), ("replica", "ipu"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = P("replica", "ipu")
    op = jax.jit(jax.shard_map(debug_x, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=typed))
    op(jnp.array([[0.0, 0.0], [2.0, 3.0]])).block_until_ready()
    found = printed()
    # Either replica may come first, since they run independently, but the lines of one replica are together.
    one, two = (
        lines("forward", f"float32[1,1], {array}", *figures, replica=f"replica {replica}, ")
        for replica, (array, figures) in enumerate(((ALIKE, [(0, 0, 0)] * 2), (DIFFERS, [(2, 2, 2), (3, 3, 3)])))
    )
    assert found in ([*one, *two], [*two, *one])


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
def test_it_prints_in_scan_remat_and_vmap(typed, printed):
    def loss(x):
        def layer(x, _):
            return 2 * debug_x(x), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, length=2)[0] ** 2)

    x = jnp.array([1.0, 10.0])
    dx = on_ipus(jax.grad(loss), 2, P("ipu"), P("ipu"), typed)(x)
    np.testing.assert_array_equal(dx, 32 * x)
    seen = [(*line.split(":")[0].split(", ")[1:], line.split(" ")[-1]) for line in printed()]
    forward = [
        ("forward", f"ipu {ipu} of 2", mean)
        for mean_01 in (("1", "10"), ("2", "20"))
        for ipu, mean in enumerate(mean_01)
    ]
    assert seen[:4] == forward
    assert [line[0] for line in seen[4:]] == ["backward"] * 4
    assert [line[2] for line in seen[4:]] == ["16", "160", "32", "320"]

    on_ipus(jax.vmap(debug_x), 2, P(None, "ipu"), P(None, "ipu"), typed)(jnp.arange(4.0).reshape(2, 2))
    means = [line.split(" ")[-1] for line in printed()]
    assert means in (["0", "1", "2", "3"], ["2", "3", "0", "1"])
