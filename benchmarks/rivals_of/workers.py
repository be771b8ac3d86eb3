"""Start the processes of a torch rival, give them orders, and wait for each answer for a limited time only.

    with Workers("torch pipeline", program, files={"weights": {...}}) as workers:
        answers = workers.order(do="steps", threads=1, steps=3)

Each process runs `python program RANK FOLDER`, reads a line of JSON from stdin for each order, and answers with a line
of JSON on stdout. FOLDER contains the files, and the processes write results there that are too large for an answer.
Between orders they wait for a pipe, so that other programs can use all cores when they are measured. This file does not
need torch.
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
from typing import Any, Final, Self

import numpy as np

from figures import Cost

NEEDS_TORCH: Final = "torch: pip install 'ipu-jax[rivals]'"


def torch_is_installed() -> bool:
    return importlib.util.find_spec("torch") is not None


class Workers:
    """The processes of one rival; use it in a `with`, which ends them all.

    Args:
        name: of the rival, for messages.
        program: the script that each process runs with its rank and a folder.
        files: for each name, the arrays of a `.npz` file that the processes find in the folder.
        count: how many processes there are.
        each: what one process is called in messages.
        limit: seconds that the processes may take for one order. The first order also waits until they have started.

    Raises:
        RuntimeError: from any order, if a process ended or took longer than `limit`. The message has its exit code and
            the last lines that it wrote to stderr.
    """

    def __init__(
        self,
        name: str,
        program: Path,
        *,
        files: Mapping[str, Mapping[str, Any]],
        count: int = 2,
        each: str = "rank",
        limit: float = 120.0,
    ):
        self._name, self._program, self._files, self._each, self._limit = name, program, files, each, limit
        self._count = count
        self.processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torch-")))
            stack.callback(self._stop)
            for name, arrays in self._files.items():
                np.savez(self.folder / f"{name}.npz", **arrays)
            for rank in range(self._count):
                self._start(rank)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def order(self, **order: Any) -> list[dict[str, Any]]:
        """Give the order to every process, and return their answers by rank."""
        line = json.dumps(order) + "\n"
        for process in self.processes:
            assert process.stdin is not None  # it is a pipe
            with contextlib.suppress(BrokenPipeError):  # _answer says what happened
                process.stdin.write(line)
                process.stdin.flush()
        deadline = time.monotonic() + self._limit
        return [json.loads(self._answer(rank, deadline, line)) for rank in range(self._count)]

    def costs(self, *, do: str = "steps", **order: Any) -> list[Cost]:
        """Return the cost of each step: CPU time summed over all processes, and rank 0's time on the clock.

        Rank 0 starts a step and ends it.
        """
        answers = self.order(do=do, **order)
        cpu = zip(*(answer["cpu"] for answer in answers), strict=True)
        return [Cost(wall, sum(parts)) for wall, parts in zip(answers[0]["wall"], cpu, strict=True)]

    def results(self) -> list[dict[str, np.ndarray]]:
        """Return the arrays that each rank wrote to `result-RANK.npz` in the folder."""
        found = []
        for rank in range(self._count):
            with np.load(self.folder / f"result-{rank}.npz") as data:
                found.append(dict(data))
        return found

    def _start(self, rank: int) -> None:
        # Without "lo", gloo looks up the machine's own name, which may not resolve. Without "PASSIVE", threads that
        # wait for work spin on a core that the other process needs, which makes two threads many times slower.
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE"}
        with self._errors(rank).open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, str(self._program), str(rank), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )
        answers: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None  # it is a pipe
            for line in process.stdout:
                answers.put(line)

        # a thread, since a pipe cannot be read with a time limit on every platform
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        self.processes.append(process)
        self._answers.append(answers)
        self._readers.append(reader)

    def _answer(self, rank: int, deadline: float, line: str) -> str:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers[rank].get(timeout=0.05)
            # any process may have died, not only this rank; a process that exited with 0 may have answered before
            codes_of = {r: process.poll() for r, process in enumerate(self.processes)}
            ended = [r for r, code in codes_of.items() if code or (r == rank and code is not None)]
            if rank in ended:
                self._readers[rank].join(1.0)  # it may still be reading the last answer
            if ended and self._answers[rank].empty():
                codes = ", ".join(f"{self._each} {r} exited with {codes_of[r]}" for r in ended)
                raise RuntimeError(f"{self._name}: {codes} at {line.strip()}\n{self._last_words(ended)}")
            if time.monotonic() > deadline:
                everyone = list(range(self._count))
                raise RuntimeError(
                    f"{self._name}: no answer from {self._each} {rank} within {self._limit:g} s to {line.strip()}\n"
                    f"{self._last_words(everyone)}"
                )

    def _errors(self, rank: int) -> Path:
        return self.folder / f"stderr-{rank}.txt"

    def _last_words(self, ranks: list[int]) -> str:
        return "\n".join(
            f"{self._each} {rank}: {line}"
            for rank in ranks
            for line in self._errors(rank).read_text().splitlines()[-12:]
        )

    def _stop(self) -> None:
        for process in self.processes:
            process.kill()  # there is nothing to save, and a process that is stuck in gloo ignores gentler signals
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.wait()
            reader.join()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # bytes that stdin still buffers have no reader
                    pipe.close()
