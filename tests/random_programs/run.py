"""Compare random programs with dense ones until the time is up, and print which of them failed.

    python tests/random_programs/run.py --minutes 60 --kind all --seed 1234
    python tests/random_programs/run.py --kind pipelines --seed 1234 --case 17      # one case again

Cases run in a separate process, which is restarted if it dies, hangs or has run for a long time. So a signal or a hang
loses only one case, not the run. The exit status is 1 if a case failed.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
KINDS = ("pipelines", "schedules", "training", "ops", "functions", "layouts")
CASES_OF_A_PROCESS = 150


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a case: it succeeded if `error` is empty."""

    kind: str
    case: int
    seconds: float
    error: str = ""


class Worker:
    """A process that runs one case after the other."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (it lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self.cases = 0
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the process is gone

    def run(self, kind: str, seed: int, case: int, timeout: float) -> Outcome:
        """Run one case. After a crash or a hang `alive` is False, and the worker cannot be used again."""
        start = time.monotonic()
        self.cases += 1
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died, which the end of its answers shows
            self._process.stdin.write(f"{json.dumps([kind, seed, case])}\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            return Outcome(kind, case, timeout, f"hangs: no end after {timeout:g} s\n{self.end()}")
        if not line:
            code = self._process.wait()
            return Outcome(
                kind, case, time.monotonic() - start, f"the process died with exit code {code}\n{self.end()}"
            )
        return Outcome(kind, case, time.monotonic() - start, json.loads(line))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> str:
        """End the process, and return the end of its stderr."""
        if self._log.closed:
            return ""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        self._log.seek(0)
        said = self._log.read()[-3000:]
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):  # the process has not read the last line
                file.close()
        return said


def _environment() -> dict[str, str]:
    found = dict(os.environ)
    paths = [str(HERE.parent.parent), str(HERE.parent), found.get("PYTHONPATH", "")]
    found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    found.pop("JAX_COMPILATION_CACHE_DIR", None)
    # a collective in which not all IPUs take part ends the process after a minute instead of hanging for ever
    flags = (
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=30 --xla_cpu_collective_call_terminate_timeout_seconds=60"
    )
    found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {flags}".strip()
    return found


class Run:
    """The cases of all kinds in turn, and their outcomes so far."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._worker: Worker | None = None
        self._spent = dict.fromkeys(args.kind, 0.0)
        self._next: dict[str, int] = {kind: args.first for kind in args.kind}
        self._start = time.monotonic()
        self.failures: list[Outcome] = []

    def go(self) -> int:
        args = self._args
        if args.case is not None:
            for kind in args.kind:
                self._one(kind, args.case)
                self._next[kind] += 1
        else:
            shown = time.monotonic()
            while time.monotonic() - self._start < 60 * args.minutes and not (args.exit_first and self.failures):
                kind = min(self._spent, key=lambda kind: self._spent[kind])  # equal time for each kind
                self._one(kind, self._next[kind])
                self._next[kind] += 1
                if time.monotonic() - shown > 30:
                    shown = time.monotonic()
                    self._say()
        self._say()
        if self._worker is not None:
            self._worker.end()
        for failure in self.failures:
            lines = failure.error.strip().splitlines()
            # the line with the error's name; after it comes jax's note on its traceback
            named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
            print(f"FAILED  {self._command(failure)}\n        {(named or lines)[-1][:200]}")
        return 1 if self.failures else 0

    def _one(self, kind: str, case: int) -> None:
        if self._worker is None or not self._worker.alive or self._worker.cases >= CASES_OF_A_PROCESS:
            if self._worker is not None:
                self._worker.end()
            self._worker = Worker()
        outcome = self._worker.run(kind, self._args.seed, case, self._args.timeout)
        self._spent[kind] += outcome.seconds
        if outcome.error:
            self.failures.append(outcome)
            print(f"--- FAILED: {self._command(outcome)}\n{outcome.error}", flush=True)

    def _command(self, outcome: Outcome) -> str:
        return (
            f"python tests/random_programs/run.py --kind {outcome.kind} --seed {self._args.seed} --case {outcome.case}"
        )

    def _say(self) -> None:
        failed = collections.Counter(failure.kind for failure in self.failures)
        counts = ", ".join(
            f"{kind} {self._next[kind] - self._args.first} ({failed[kind]} failed)" for kind in self._args.kind
        )
        print(f"{(time.monotonic() - self._start) / 60:.1f} min, seed {self._args.seed}: {counts}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to go on (5)")
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all", help="of which kind (all)")
    parser.add_argument("--seed", type=int, help="of all cases; drawn by the clock unless given")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (0)")
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a case (180)")
    parser.add_argument("--exit-first", action="store_true", help="stop at the first failure")
    args: Any = parser.parse_args(argv)
    args.kind = KINDS if args.kind == "all" else (args.kind,)
    args.seed = time.time_ns() % 10**9 if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    return Run(args).go()


if __name__ == "__main__":
    sys.exit(main())
