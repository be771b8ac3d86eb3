"""Run one instance of MNIST's network on replicas of ipu_jax, on orders: 2 instances, or 1 that has both replicas.

    python jax_instance.py RANK FOLDER

Orders and answers are the same as in `torch_replica.py`. FOLDER/run.npz contains the number of instances and the port
by which they meet. An order names a program: "replicated" and "sharded" run on the replicas, and "alone" is one program
in plain jax that has the whole batch and both cores. Each instance gets the environment that poprun would give it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

REPLICAS = 2
RATE = 0.1
LAYERS = ("hidden", "features", "classifier")


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).parents[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints to stdout, which is only for answers
    instances = _connect(rank, folder)
    worker = _Worker(rank, folder, instances)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


def _connect(rank: int, folder: Path) -> int:
    from ipu_jax import configure, popdist

    with np.load(folder / "run.npz") as run:
        instances, port = int(run["instances"]), int(run["port"])
    local = REPLICAS // instances
    if instances > 1:
        address = f"127.0.0.1:{port}"
        place = {
            "IPU_JAX_INSTANCE": rank,
            "IPU_JAX_INSTANCES": instances,
            "POPDIST_LOCAL_INSTANCE_INDEX": rank,
            "POPDIST_NUM_TOTAL_REPLICAS": REPLICAS,
            "POPDIST_NUM_IPUS_PER_REPLICA": 1,
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "PJRT_NPROC": local + max(1, (os.cpu_count() or 1) // instances),
        }
        os.environ.update({name: str(value) for name, value in place.items()})
    popdist.init(check_flags=False)  # each has its own number as an argument
    configure(local)
    return instances


class _Worker:
    def __init__(self, rank: int, folder: Path, instances: int):
        self._rank, self._folder, self._instances = rank, folder, instances
        with np.load(folder / "weights.npz") as found:
            self._params = {name: {k: found[f"{name}.{k}"] for k in ("w", "b")} for name in LAYERS}
        self._programs: dict[str, Any] = {}
        self._batches: dict[tuple[str, str], Any] = {}

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        import jax

        import replicas
        from ipu_jax import popdist

        if order["do"] == "result":
            self._programs.pop(order["program"], None)  # it starts from the given weights
        program, batch = self._program(order["program"]), self._batch(order["program"], order["batch"])
        if order["do"] == "result":
            loss = float(program(batch))
            found: dict[str, Any] = replicas.named(program.step.whole(program.state)["params"])
            np.savez(self._folder / f"result-{self._rank}.npz", **found, loss=np.float32(loss))
            return {}
        if order["do"] == "collectives":
            compiled = program.step.lower(program.state, batch).compile()
            return {"collectives": replicas.collectives_of(compiled)}
        wall, cpu = [], []
        for _ in range(order["steps"]):
            if self._instances > 1:
                popdist.barrier("a step")
            started, worked = time.perf_counter(), time.process_time()
            loss = program(batch)
            jax.block_until_ready((loss, program.weights()))
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - worked)
        return {"wall": wall, "cpu": cpu}

    def _program(self, name: str) -> Any:
        import optax

        import replicas

        if name not in self._programs:
            if name == "alone":
                self._programs[name] = replicas.Unsharded(self._params, optax.sgd(RATE))
            else:
                sharded = name == "sharded"
                self._programs[name] = replicas.Replicated(self._params, optax.sgd(RATE), shard_optimizer=sharded)
        return self._programs[name]

    def _batch(self, program: str, name: str) -> Any:
        """Return the batch, (replicas, 1, rows, ...), on the devices that read it; for "alone", the whole batch."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        if (program, name) not in self._batches:
            with np.load(self._folder / f"batch-{name}.npz") as found:
                batch = {k: found[k][:, None] for k in ("images", "labels")}
            if program == "alone":
                placed = {k: jax.numpy.asarray(leaf.reshape(-1, *leaf.shape[3:])) for k, leaf in batch.items()}
            else:
                mesh = self._programs[program].step.model.mesh
                sharding = NamedSharding(mesh, PartitionSpec("replica"))
                placed = {
                    k: jax.make_array_from_callback(leaf.shape, sharding, lambda i, leaf=leaf: leaf[i])
                    for k, leaf in batch.items()
                }
            self._batches[program, name] = placed
        return self._batches[program, name]


if __name__ == "__main__":
    main()
