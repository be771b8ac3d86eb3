"""Test that an update by rows of arrays on the host is the update of whole arrays. NumPy is the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax import make_mesh
from ipu_jax.core.mesh import host_memory
from ipu_jax.core.mesh.guard import guard
from ipu_jax.core.mesh.host_memory import HOST, bare, updated_by_rows

SHAPES = {"a stack": (7, 5, 3), "a matrix": (48, 4), "tiles": (2, 8, 128), "an odd matrix": (50, 7), "flat": (40,)}
TOGETHER = {"a stack": {2, 1}, "a matrix": {16}, "tiles": {1}}  # rows that are fetched at a time


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_update_by_rows_is_the_update_of_all(name, is_whole, monkeypatch):
    shape, mesh, fetched = SHAPES[name], make_mesh(1, 1), list[int]()
    monkeypatch.setattr(host_memory, "_AT_ONCE", 130)  # bytes: 2 rows of a stack, and of a matrix one tile
    w, m, g = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    on = lambda kind: NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    held = jax.device_put(m[None, None], on(HOST))

    def update(cut: Any, arrays: Any) -> Any:
        weights, moments = arrays
        fetched.append(weights.shape[0])
        new = 0.5 * moments + cut(jnp.asarray(g))
        return [weights - new, new]

    def program(active: Any, w: Any, held: Any) -> Any:
        rows = None if is_whole else shape[0]
        body = lambda fence, old: updated_by_rows(old, update, shape, rows=rows, zero=fence.zero)
        w, held = guard(jnp.int32(0), active, body, [w, bare(held)])[1]
        return w, held

    mapped = jax.shard_map(program, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    new_w, new_m = jax.jit(mapped)(True, jax.device_put(w, on("device")), held)
    assert new_m.sharding.memory_kind == HOST
    np.testing.assert_allclose(np.asarray(new_m).reshape(shape), 0.5 * m + g, rtol=1e-6)
    np.testing.assert_allclose(new_w, w - (0.5 * m + g), rtol=1e-5, atol=1e-6)
    assert {*fetched} == ({shape[0]} if is_whole else TOGETHER.get(name, {shape[0]}))


def test_rows_beyond_the_first_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(host_memory, "_AT_ONCE", 4 * 15)
    arrays = [jnp.ones((7, 5, 3)), jnp.ones((7, 5, 3))]
    new = updated_by_rows(arrays, lambda cut, arrays: [a + 1 for a in arrays], (7, 5, 3), rows=4, zero=jnp.int32(0))
    for array in new:
        assert array[:, 0, 0].tolist() == [2, 2, 2, 2, 1, 1, 1]
