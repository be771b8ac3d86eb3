"""`torch.distributed.pipelining` as a rival: starts a process a stage, gives orders, and never waits for ever.

    with TorchPipeline(weights, batches) as rival:
        loss, gradients = rival.result("64x16", "1F1B")
        costs = rival.costs("64x16", "1F1B", threads=2, steps=3)

Between orders the processes wait on a pipe, so that what is measured beside them has the cores to itself.
`torch_stage.py` is what they run. This file needs no torch.
"""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from figures import Cost

STAGES: Final = 2
SCHEDULES: Final = ("1F1B", "GPipe")
_PROGRAM: Final = Path(__file__).with_name("torch_stage.py")


def is_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **arrays)


class TorchPipeline:
    """The processes of one pipeline; use it in a `with`, which ends them all.

    Args:
        weights: `{"hidden.w": (P, H), "hidden.b": (H,), ...}` for "hidden", "features" and "classifier".
        batches: per name `{"images": (M, B, 28, 28) uint8, "labels": (M, B)}`.
        limit: seconds that the processes may take for one order, the first of which waits for them to start.
        program: the script that each process runs with its rank and a folder; tests put their own.

    Raises:
        RuntimeError: from any order, when a process ended or took longer than `limit`: with its exit code and the last
            lines that it wrote to stderr.
    """

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        batches: Mapping[str, Mapping[str, np.ndarray]],
        *,
        limit: float = 120.0,
        program: Path = _PROGRAM,
    ):
        self._weights, self._batches, self._limit, self._program = weights, batches, limit, program
        self._counts = {name: len(batch["labels"]) for name, batch in batches.items()}
        self.workers: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> "TorchPipeline":
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torch-pipeline-")))
            stack.callback(self._stop)
            _save(self._folder / "weights.npz", self._weights)
            for name, batch in self._batches.items():
                _save(self._folder / f"batch-{name}.npz", batch)
            for rank in range(STAGES):
                self._start(rank)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def result(self, batch: str, schedule: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Mean loss over the micro-batches, and the gradients of their sum, laid out and named as the weights."""
        self._order(do="result", batch=batch, schedule=schedule, threads=1)
        found: dict[str, np.ndarray] = {}
        for rank in range(STAGES):
            with np.load(self._folder / f"result-{rank}.npz") as data:
                found |= dict(data)
        return found.pop("loss"), found

    def costs(self, batch: str, schedule: str, *, threads: int, steps: int) -> list[Cost]:
        """What each step cost: all processes' CPU work, and the clock of rank 0, which starts a step and ends it."""
        answers = self._order(do="steps", batch=batch, schedule=schedule, threads=threads, steps=steps)
        cpu = zip(*(answer["cpu"] for answer in answers), strict=True)
        return [Cost(wall, sum(parts)) for wall, parts in zip(answers[0]["wall"], cpu, strict=True)]

    def _start(self, rank: int) -> None:
        # lo: gloo otherwise looks up the machine's own name, which need not resolve. PASSIVE: threads that wait for
        # work must not spin on a core that the other process needs, which makes two threads many times slower
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE"}
        with self._errors(rank).open("w") as errors:
            worker = subprocess.Popen(
                [sys.executable, str(self._program), str(rank), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )
        answers: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert worker.stdout is not None  # it is a pipe
            for line in worker.stdout:
                answers.put(line)

        # a thread, since a pipe cannot be read with a time limit on every platform
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        self.workers.append(worker)
        self._answers.append(answers)
        self._readers.append(reader)

    def _order(self, batch: str, **order: Any) -> list[dict[str, Any]]:
        line = json.dumps({"batch": batch, "count": self._counts[batch], **order}) + "\n"
        for worker in self.workers:
            assert worker.stdin is not None  # it is a pipe
            with contextlib.suppress(BrokenPipeError):  # _answer says what happened
                worker.stdin.write(line)
                worker.stdin.flush()
        deadline = time.monotonic() + self._limit
        return [json.loads(self._answer(rank, deadline, line)) for rank in range(STAGES)]

    def _answer(self, rank: int, deadline: float, line: str) -> str:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers[rank].get(timeout=0.05)
            # any of them: the one that died is seldom the one that waits for it
            ended = [r for r, worker in enumerate(self.workers) if worker.poll() is not None]
            if ended and self._answers[rank].empty():
                codes = ", ".join(f"stage {r} exited with {self.workers[r].returncode}" for r in ended)
                raise RuntimeError(f"torch pipeline: {codes} at {line.strip()}\n{self._last_words(ended)}")
            if time.monotonic() > deadline:
                everyone = list(range(STAGES))
                raise RuntimeError(
                    f"torch pipeline: no answer from stage {rank} within {self._limit:g} s to {line.strip()}\n"
                    f"{self._last_words(everyone)}"
                )

    def _errors(self, rank: int) -> Path:
        return self._folder / f"stderr-{rank}.txt"

    def _last_words(self, ranks: list[int]) -> str:
        return "\n".join(
            f"stage {rank}: {line}" for rank in ranks for line in self._errors(rank).read_text().splitlines()[-12:]
        )

    def _stop(self) -> None:
        for worker in self.workers:
            worker.kill()  # there is nothing to save, and one that is stuck in gloo hears nothing gentler
        for worker, reader in zip(self.workers, self._readers, strict=True):
            worker.wait()
            reader.join()
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # what stdin still buffers has no reader
                    pipe.close()
