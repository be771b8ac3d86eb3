"""Report the CPU time of a run, and the fast tests that take more than their bound.

Machines differ, so a run fails above a bound only with `--budget`. A test is charged for its process, with all threads
of XLA, and for the processes that it started, once they have ended. The first test that needs a fixture or an import is
charged for it.
"""

import os
from collections.abc import Generator
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest

_LISTED = 40  # tests above the bound, at most


class Bounds(NamedTuple):
    """CPU time on a machine such as CI's."""

    test: float  # seconds of a test that is not marked slow
    run: float  # minutes of pytest, with all its processes


# XLA takes 1.9 times as long to compile since jaxlib 0.11. The type checker takes 2.5 minutes beside pytest, and `make
# test` is to take 12, or 18.
BOUNDS = Bounds(3.0, 9.5) if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11) else Bounds(4.5, 15.5)


class CpuBudget:
    """Measure tests in the processes that run them, and add up in the one that reports.

    Args:
        strict: whether a run that takes too much, or a test, gives the exit status 1.
        bounds: what they may take.
    """

    def __init__(self, *, strict: bool, bounds: Bounds = BOUNDS):
        self._strict, self._bounds = strict, bounds
        self._began = 0.0
        self._workers = 0.0
        self._over: list[tuple[float, str]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._began = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        report = yield
        if call.when == "teardown" and item.get_closest_marker("slow") is None:
            report.cpu_seconds = sum(os.times()[:4]) - self._began
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = getattr(report, "cpu_seconds", 0.0)
        if seconds > self._bounds.test:
            self._over.append((seconds, report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_seconds"] = sum(os.times()[:4])
        elif self._strict and self._is_above() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def _minutes(self) -> float:
        # Workers count what they say, and not a second time as children that have ended.
        return (self._workers + sum(os.times()[: 2 if self._workers else 4])) / 60

    def _is_above(self) -> bool:
        return bool(self._over) or self._minutes() > self._bounds.run

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = sorted(self._over, reverse=True)
        for seconds, name in over[:_LISTED]:
            terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
        if len(over) > _LISTED:
            terminalreporter.write_line(f"          and {len(over) - _LISTED} more")
        line = f"CPU time: {self._minutes():.3g} minutes (bound {self._bounds.run:g})"
        terminalreporter.write_line(f"{line}; {len(over)} fast tests above {self._bounds.test:g} s")
