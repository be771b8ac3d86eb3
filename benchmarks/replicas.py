"""Measure the cost of a training step on two replicas, and the saving by sharding the optimizer over them.

The MNIST example's network with plain SGD, on two replicas of one virtual IPU each, is compared with one program that
has the whole batch on both cores. Every step reduces the gradients of 5.3 million weights, whatever the size of the
batch; a small batch shows the cost of this. `sharded` is `shard_optimizer=True`: each replica updates its half of the
weights. `DDP` is torch's `DistributedDataParallel` with one process per replica, over gloo, with SGD and with the same
weights and images. An overhead is the step time on two replicas relative to one program of the same framework on both
cores. Our overhead is compared with torch's.

    python benchmarks/replicas.py [--check]
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from figures import Cost, Costs, Figures, cost_of, in_turn, median_ratio, side_by_side
from ipu_jax import TrainOptions, configure, make_train_step
from ipu_jax.chips import Program
from mnist_example.model import init_params
from rivals_of.torch_pipeline import TorchPipeline
from rivals_of.workers import NEEDS_TORCH, torch_is_installed

REPLICAS = 2
RATE = 0.1
ROUNDS, STEPS = 12, 5
THREADS = (1, 2)  # of each torch process; the figures use the better of the two
TORCH_REPLICA = Path(__file__).with_name("rivals_of") / "torch_replica.py"
# global batch, bound for step time / the unsharded program's, bound for our overhead / torch's
SIZES = ((256, 1.8, 0.90), (2048, 1.15, 1.00))
KINDS = {"replicated": False, "sharded": True}
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")


def loss_fn(params: Any, batch: Any) -> Any:
    x = batch["images"].reshape(-1, 784).astype(params["hidden"]["w"].dtype) / 255
    for layer in (params["hidden"], params["features"]):
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params["classifier"]["w"] + params["classifier"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


class Unsharded:
    """One program with the whole batch, in plain jax and optax, which donates its weights."""

    def __init__(self, params: Any, optimizer: Any):
        def update(params: Any, state: Any, batch: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.update = jax.jit(update, donate_argnums=(0, 1))
        self.params = jax.tree.map(jnp.array, params)
        self.state = optimizer.init(self.params)

    def __call__(self, batch: Any) -> Any:
        self.params, self.state, loss = self.update(self.params, self.state, batch)
        return loss

    def weights(self) -> Any:
        return self.params


class Replicated:
    """The training step of ipu_jax, on replicas."""

    def __init__(self, params: Any, optimizer: Any, *, shard_optimizer: bool):
        options = TrainOptions(replication_factor=REPLICAS, shard_optimizer=shard_optimizer)
        self.step = make_train_step(loss_fn, optimizer, options)
        self.state = self.step.init(params)

    def __call__(self, batch: Any) -> Any:
        self.state, outputs = self.step(self.state, batch)
        return outputs.loss

    def weights(self) -> Any:
        return self.state.params


def collectives_of(compiled: Any) -> dict[str, tuple[int, int]]:
    """Return, for each kind of collective, how many of it a program contains, and their results' bytes on one IPU."""
    sent = {kind: [one.nbytes for one in Program(compiled).collectives if one.op == kind] for kind in COLLECTIVES}
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in sent.items()}


def bytes_on_one_ipu(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def torch_figures(figures: Figures, params: Any, batches: dict[str, Any]) -> None:
    """Compare our step under a sharded optimizer with DDP's step, and the overheads of both."""
    for size, _, bound in SIZES:
        name, batch = str(size), batches[str(size)]
        compare_updates(figures, params, batch, name)
        with TorchPipeline(named(params), {name: jax.tree.map(np.asarray, batch)}, program=TORCH_REPLICA) as rival:
            ours = Replicated(params, optax.sgd(RATE), shard_optimizer=True)
            split = jax.tree.map(lambda leaf: leaf[:, None], batch)
            one = Unsharded(params, optax.sgd(RATE))
            whole = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
            costs = _side_by_torch(partial(ours, split), partial(one, whole), rival, name)
            ddp, alone = (min(THREADS, key=lambda t, of=of: costs[of, t].wall) for of in ("DDP", "torch"))
            mine, theirs = (
                [a.wall / b.wall for a, b in zip(costs[two].calls, costs[base].calls, strict=True)]
                for two, base in (("ours", "one"), (("DDP", ddp), ("torch", alone)))
            )
            figures.add(f"overhead, sharded, batch {name}", statistics.median(mine))
            figures.add(
                f"overhead, DDP with threads={ddp}, torch with threads={alone}, batch {name}", statistics.median(theirs)
            )
            figures.add(f"overhead / torch's overhead, sharded, batch {name}", median_ratio(mine, theirs), bound)
            ratio = costs["ours"] / costs["DDP", ddp]
            figures.add(f"step time / DDP's, sharded, batch {name}, threads={ddp}", ratio.wall)
            figures.add(f"CPU work / DDP's, sharded, batch {name}, threads={ddp}", ratio.cpu)


def compare_updates(figures: Figures, params: Any, batch: Any, name: str) -> None:
    """Compare one update with DDP's, both in float32 and both in float64.

    In float32 an activation near the kink of relu may round to its other side, which changes an update by more than the
    usual rounding. So its difference has no bound, and float64 shows that rounding is the reason.
    """
    before, sgd = named(params), optax.sgd(RATE)
    after: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for dtype in ("float64", "float32"):
        with jax.enable_x64(dtype == "float64"):
            whole = jax.tree.map(lambda w, dtype=dtype: np.asarray(w, dtype), params)
            ours = Replicated(whole, sgd, shard_optimizer=True)
            loss = float(ours(jax.tree.map(lambda leaf: leaf[:, None], batch)))
            after["ours", dtype] = named(ours.step.whole(ours.state)["params"])
        with TorchPipeline(named(whole), {name: jax.tree.map(np.asarray, batch)}, program=TORCH_REPLICA) as rival:
            theirs, after["DDP's", dtype] = rival.result(name, "DDP")
        where, wide = f"{dtype}, batch {name}", dtype == "float64"
        difference = abs(loss / float(theirs) - 1)
        figures.add(f"loss / DDP's, relative difference, {where}", difference, 1e-12 if wide else 1e-5)
        difference = _difference_of_updates(before, after["ours", dtype], after["DDP's", dtype])
        figures.add(f"an update / DDP's, relative difference, {where}", difference, 1e-12 if wide else None)
    for whose in ("ours", "DDP's"):
        difference = _difference_of_updates(before, after[whose, "float32"], after[whose, "float64"])
        figures.add(f"an update, float32 / float64, relative difference, {whose}, batch {name}", difference)


def named(params: Any) -> dict[str, np.ndarray]:
    """Return the weights under the names of `TorchPipeline`."""
    return {f"{name}.{k}": np.asarray(w) for name, layer in params.items() for k, w in layer.items()}


def _difference_of_updates(
    before: dict[str, np.ndarray], found: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> float:
    """Return the largest norm of the difference of two updated leaves, relative to the norm of the leaf's update.

    The rounding of `found` when the update is added to its weights does not count.
    """

    def of(leaf: str) -> float:
        rounding = np.finfo(found[leaf].dtype).eps * abs(before[leaf])
        beyond = np.maximum(abs(found[leaf] - expected[leaf]) - rounding, 0)
        return float(np.linalg.norm(beyond) / np.linalg.norm(expected[leaf] - before[leaf]))

    return max(map(of, before))


def _side_by_torch(
    ours: Callable[[], Any], one: Callable[[], Any], rival: TorchPipeline, batch: str
) -> dict[Any, Costs]:
    def rounds_of(step: Callable[[], Any]) -> Callable[[], list[Cost]]:
        return lambda: [cost_of(step) for _ in range(STEPS)]

    programs: dict[Any, Callable[[], list[Cost]]] = {"ours": rounds_of(ours), "one": rounds_of(one)}
    for threads in THREADS:
        programs["DDP", threads] = partial(rival.costs, batch=batch, threads=threads, steps=STEPS)
        programs["torch", threads] = partial(rival.costs, do="alone", batch=batch, threads=threads, steps=STEPS)
    return in_turn(programs, ROUNDS)


def main() -> int:
    figures = Figures("replicas: step time, collectives and optimizer bytes of two replicas over one program's")
    figures.shrink(__name__, SIZES=((8, None, None),), ROUNDS=1, STEPS=1)
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    configure(REPLICAS)
    params = init_params(0)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    random = np.random.default_rng(1)
    batches: dict[str, Any] = {}
    for size, most, _ in SIZES:
        images = jnp.asarray(random.integers(0, 256, (size, 28, 28), np.uint8))
        labels = jnp.asarray(random.integers(0, 10, size, np.int32))
        whole = {"images": images, "labels": labels}
        split = jax.tree.map(lambda leaf, n=size: leaf.reshape(REPLICAS, 1, n // REPLICAS, *leaf.shape[1:]), whole)
        batches[str(size)] = jax.tree.map(lambda leaf: leaf[:, 0], split)
        programs = {kind: Replicated(params, optax.sgd(RATE), shard_optimizer=on) for kind, on in KINDS.items()}
        one = Unsharded(params, optax.sgd(RATE))
        calls = [partial(one, whole), *(partial(program, split) for program in programs.values())]
        dense, *found = side_by_side(*calls)
        loss, *losses = (float(call()) for call in calls)  # each has made the same number of updates
        figures.add(
            f"largest relative difference of a loss, batch {size}", max(abs(v / loss - 1) for v in losses), 1e-4
        )
        for kind, cost in zip(programs, found, strict=True):
            bound = most if kind == "sharded" else None
            figures.add(f"step time / one program's on both cores, {kind}, batch {size}", cost.wall / dense.wall, bound)
            figures.add(f"CPU work / one program's, {kind}, batch {size}", cost.cpu / dense.cpu)
        if size == SIZES[0][0]:
            for kind, program in programs.items():
                compiled = program.step.lower(program.state, split).compile()
                for name, (count, of_bytes) in collectives_of(compiled).items():
                    figures.add(f"{name}s in a step, {kind}", count, 4)
                    figures.add(f"bytes of {name}s' results / weights', {kind}", of_bytes / weights, 1.01)
    for kind, on in KINDS.items():
        for name, optimizer, moments in (("momentum", optax.sgd(RATE, momentum=0.9), 1), ("adam", optax.adam(1e-3), 2)):
            state = Replicated(params, optimizer, shard_optimizer=on).state
            share = bytes_on_one_ipu(state.optimizer) / weights
            figures.add(
                f"bytes of {name}'s state on an IPU / weights', {kind}", share, moments / (REPLICAS if on else 1) + 0.01
            )
    if torch_is_installed():
        torch_figures(figures, params, batches)
    else:
        figures.leave_out("torch's DistributedDataParallel", NEEDS_TORCH)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
