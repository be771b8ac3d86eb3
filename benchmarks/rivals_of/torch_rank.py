"""What every rank of a torch rival does: meets the others over gloo, takes orders (see `workers.py`), answers them."""

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports] (an extra of its own)
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

LIMIT = datetime.timedelta(seconds=60)  # a peer that is gone ends this process too
RANKS = 2


def costs_of(step: Callable[[], Any], steps: int) -> dict[str, list[float]]:
    """The answer to "steps": seconds on the clock and of CPU work of each, begun by all ranks together."""
    wall, cpu = [], []
    for _ in range(steps):
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - worked)
    return {"wall": wall, "cpu": cpu}


def serve(make_worker: Callable[[int, Path], Any]) -> None:
    """Answers orders until stdin ends; `make_worker(rank, folder)` has `answer(order)`."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # stdout is for answers alone: gloo's C++ prints to it, and is sent to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=LIMIT)
    worker = make_worker(rank, folder)
    for line in sys.stdin:
        order = json.loads(line)
        torch.set_num_threads(order["threads"])
        print(json.dumps(worker.answer(order)), file=answers, flush=True)
    dist.destroy_process_group()
