"""Measure what an optimizer that looks at whole matrices sends: Muon in a pipeline, beside Muon on sharded matrices.

Residual MLPs with stacked weights (layers, D, F) and (layers, F, D) are one loss function, cut for 4 virtual IPUs. Each
IPU has all of its layers' matrices, and orthogonalizes them alone. Beside it runs optax's update in plain JAX, where
each matrix is divided over 4 devices, as under FSDP and tensor parallelism, and XLA puts communication in (GSPMD).

    bytes           of the results of all collectives, on one IPU: of an update alone; and of a training step with Muon,
                    less those with SGD
    difference      of the weights after three updates, relative to optax on one device

    python benchmarks/muon.py [--check]
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from figures import Figures, largest_relative_difference
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.chips import Program

IPUS, LAYERS, WIDTH, HIDDEN, ROWS, MICRO_BATCHES, UPDATES = 4, 8, 128, 512, 16, 8, 3
SCHEDULES = ("1f1b", "zb-h1")
OF_LAYERS = optax.contrib.MuonDimensionNumbers(1, 2)
DIMENSIONS: Any = {"up": OF_LAYERS, "down": OF_LAYERS, "scale": None}
MUON = optax.contrib.muon(0.01, muon_weight_dimension_numbers=DIMENSIONS)
# how the rival divides its matrices: along a dim of each, or along the layers
DIVIDED = {"columns": PartitionSpec(None, None, "x"), "rows": PartitionSpec(None, "x"), "layers": PartitionSpec("x")}


def weights() -> Any:
    rng = np.random.default_rng(0)
    normal = lambda *shape: (0.1 * rng.normal(size=shape)).astype(np.float32)
    matrices = {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH)}
    return {**matrices, "scale": np.ones((LAYERS, WIDTH), np.float32)}


def loss(params: Any, x: Any) -> Any:
    layer = lambda x, w: (x + jnp.tanh(x * w["scale"] @ w["up"]) @ w["down"], None)
    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def bytes_sent(compiled: Any) -> int:
    """Return the bytes of the results of a program's collectives on one device."""
    return sum(one.runs * one.nbytes for one in Program(compiled).collectives)


def plain_update(gradients: Any, state: Any, params: Any) -> Any:
    updates, state = MUON.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def main() -> int:
    figures = Figures("what Muon sends, in a pipeline and on sharded matrices")
    figures.shrink(__name__, WIDTH=8, HIDDEN=12, ROWS=2, MICRO_BATCHES=4, SCHEDULES=SCHEDULES[:1])
    configure(IPUS)
    params = weights()
    batch = np.random.default_rng(1).normal(size=(MICRO_BATCHES, ROWS, WIDTH)).astype(np.float32)
    all_gradients = [
        jax.tree.map(lambda w, k=k: np.cos(w * (k + 9)).astype(np.float32), params) for k in range(UPDATES)
    ]
    on_one, state = params, MUON.init(params)
    for gradients in all_gradients:
        on_one, state = jax.jit(plain_update)(gradients, state, on_one)

    for schedule in SCHEDULES:
        options = {"ipus": IPUS, "schedule": schedule, "gradient_accumulation": MICRO_BATCHES}
        pipeline = Pipeline.from_function(loss, params, batch[0], **options)
        optimizer, placed = pipeline.optimizer(MUON), pipeline.shard(params)
        of_ipus, sent = optimizer.init(placed), {}
        update = jax.jit(optimizer.apply).lower(placed, of_ipus, placed).compile()
        for gradients in all_gradients:
            placed, of_ipus = update(pipeline.shard(gradients), of_ipus, placed)
        difference = largest_relative_difference(pipeline.unshard(placed), on_one)
        figures.add(f"weights, pipeline, {schedule}, relative difference", difference, 1e-6)
        figures.add(f"bytes of collectives in the update, pipeline, {schedule}", bytes_sent(update), 0)
        for name, tx in (("Muon", MUON), ("SGD", optax.sgd(0.01))):
            step = make_train_step(pipeline, tx)
            sent[name] = bytes_sent(step.lower(step.init(params), batch).compile())
        difference = sent["Muon"] - sent["SGD"]
        figures.add(f"bytes of collectives in a step, Muon - SGD, pipeline, {schedule}", difference, 0, at_least=0)

    mesh = Mesh(np.array(jax.devices()[:IPUS]), ("x",))
    of_device = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / IPUS
    for name, spec in DIVIDED.items():
        place = lambda leaf: NamedSharding(mesh, spec if np.ndim(leaf) == 3 else PartitionSpec())  # noqa: B023
        divided, state = (jax.device_put(tree, jax.tree.map(place, tree)) for tree in (params, MUON.init(params)))
        places = jax.tree.map(place, (divided, state))
        update = jax.jit(plain_update, out_shardings=places).lower(divided, state, divided).compile()
        for gradients in all_gradients:
            divided, state = update(jax.device_put(gradients, places[0]), state, divided)
        difference = largest_relative_difference(divided, on_one)
        figures.add(f"weights, GSPMD, matrices divided along {name}, relative difference", difference, 1e-5)
        figures.add(f"bytes of collectives in the update, GSPMD, divided along {name}", bytes_sent(update))
        least = None if name == "layers" else 1
        figures.add(f"the same / bytes of a device's weights, {name}", bytes_sent(update) / of_device, at_least=least)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
