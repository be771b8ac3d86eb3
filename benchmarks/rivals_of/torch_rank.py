"""Run a rank of a torch rival: connect to the others over gloo, and answer orders (see `workers.py`)."""

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

LIMIT = datetime.timedelta(seconds=60)  # if a peer is gone for this long, this process ends too
RANKS = 2


def costs_of(step: Callable[[], Any], steps: int, *, alone: bool = False) -> dict[str, list[float]]:
    """Return the answer to "steps": each step's time on the clock and CPU time.

    All ranks start a step together, unless this one runs `alone`.
    """
    wall, cpu = [], []
    for _ in range(steps):
        if not alone:
            dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - worked)
    return {"wall": wall, "cpu": cpu}


def serve(make_worker: Callable[[int, Path], Any]) -> None:
    """Answer orders until stdin ends, each with the method `answer(order)` of `make_worker(rank, folder)`."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # stdout is for answers only, but gloo's C++ prints to it, so its output is redirected to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=LIMIT)
    worker = make_worker(rank, folder)
    for line in sys.stdin:
        order = json.loads(line)
        torch.set_num_threads(order["threads"])
        print(json.dumps(worker.answer(order)), file=answers, flush=True)
    dist.destroy_process_group()
