"""Test which rows each instance reads, where replicas are on several instances or instances have unlike numbers."""

import json
from typing import Any

import numpy as np
import pytest

from support import across_feeds
from support.instances import Results, run_instances

REPLICAS, IPUS, PER_REPLICA = 2, 2, 4  # an update is 2 micro-batches of 2 examples on each replica
EXAMPLES = 37
# by the devices of each instance, the replicas that it has devices of
PLACEMENTS = {(2, 1, 1): [[0], [1], [1]], (1, 2, 1): [[0], [0, 1], [1]]}


def rows_of_epoch(options: Any) -> list[np.ndarray]:
    """Return all batches of epoch 0, (updates, replicas, examples), by NumPy alone; -1 where there is no example."""
    order = np.arange(EXAMPLES)
    if options.get("shuffle", True) and not options.get("stream"):
        np.random.default_rng([options.get("seed", 0), 0]).shuffle(order)
    updates = options.get("device_iterations", 1)
    per_batch = updates * REPLICAS * PER_REPLICA
    padded = np.concatenate([order, np.full(-EXAMPLES % per_batch, -1)])
    return list(padded.reshape(-1, updates, REPLICAS, PER_REPLICA))


def check_rows(found: list[Results], number: int, options: Any, owned: list[list[int]], first: int = 0) -> None:
    """Check that instance i has exactly the rows of the replicas `owned[i]`, from batch number `first` on."""
    batches = rows_of_epoch(options)[first:][: options.get("batches")]
    for replicas, results in zip(owned, found, strict=True):
        names = {name for name in results if name.startswith(f"{number} batch") and "replica" in name}
        assert names == {f"{number} batch {at} replica {r}" for at in range(len(batches)) for r in replicas}
        for at, batch in enumerate(batches):
            for r in replicas:
                np.testing.assert_array_equal(results[f"{number} batch {at} replica {r}"], batch[:, r].reshape(-1))
            real = results[f"{number} batch {at} is real"]
            np.testing.assert_array_equal(real.reshape(-1), batch[:, replicas].reshape(-1) >= 0)
            examples = (batch >= 0).sum()
            assert results[f"{number} batch {at} counts"].tolist() == [
                examples,
                -(-examples // (batch.size // len(batch))),
            ]
        if not options.get("stream"):
            own = np.concatenate([batch[:, replicas].reshape(-1) for batch in batches])
            # example 0 is also read to see what all are like
            np.testing.assert_array_equal(results[f"{number} reads"], np.setdiff1d(np.union1d(own, [0]), [-1]))


@pytest.mark.slow
@pytest.mark.parametrize("devices", PLACEMENTS)
def test_each_instance_reads_the_rows_of_its_own_replicas(devices):
    """It is also resumed by other numbers of instances than those that began the epoch."""
    began = across_feeds.fed(REPLICAS, IPUS, [{"batches": 2}])  # in this process alone
    state = json.loads(str(began["0 state"]))
    each: list[dict[str, Any]] = [
        {},
        {"shuffle": False, "device_iterations": 2, "prefetch": 2},
        {"stream": True},
        {"state": state},
        {"batches": 2},
        {"stream": True, "batches": 2},
    ]
    found = run_instances(across_feeds.fed, devices, replicas=REPLICAS, ipus=IPUS, each=each)
    for number, options in enumerate(each):
        check_rows(found, number, options, PLACEMENTS[devices], first=2 * (number == 3))
    states = {tuple(str(results[f"{number} state"]) for number in range(len(each))) for results in found}
    assert len(states) == 1, "a state is the same on all instances"
    for number in (4, 5):
        again = {**each[number], "batches": None, "state": json.loads(str(found[0][f"{number} state"]))}
        check_rows([across_feeds.fed(REPLICAS, IPUS, [again])], 0, again, [[0, 1]], first=2)
