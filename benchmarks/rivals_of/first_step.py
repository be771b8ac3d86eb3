"""Run one training step of MNIST's network on two replicas, alone or under poprun, and print when its loss is known.

python first_step.py [unchecked]     `unchecked`: instances do not compare what they are about to run
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import optax

from ipu_jax import configure, popdist
from mnist_example.model import init_params
from replicas import REPLICAS, Replicated

ROWS = 128


def main() -> None:
    popdist.init(check_programs="unchecked" not in sys.argv)
    configure(popdist.get_num_local_ipus() if popdist.is_popdist_env_set() else REPLICAS)
    rng = np.random.default_rng(0)
    batch = {
        "images": rng.integers(0, 256, (REPLICAS, 1, ROWS, 28, 28), np.uint8),
        "labels": rng.integers(0, 10, (REPLICAS, 1, ROWS), np.int32),
    }
    program = Replicated(init_params(0), optax.sgd(0.1), shard_optimizer=True)
    popdist.barrier("before the first call")
    began = time.perf_counter()
    loss = float(program(batch))
    if popdist.get_instance_index() == 0:
        print(f"time={time.time():.6f} loss={loss:.6f} call={time.perf_counter() - began:.6f}", flush=True)


if __name__ == "__main__":
    main()
