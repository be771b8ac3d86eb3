"""Set jax up for every test and doctest: 8 virtual IPUs on the CPU, and no test that hangs in a collective.

This file is at the top, not in tests/, because the doctests of the packages need it as well. It runs before anything
starts a jax backend, since these settings have no effect afterwards. Processes that a test starts inherit them.

A plain `pytest` runs the fast tests. The tests marked slow are divided into N equal parts, for any N: the cases of each
function take turns, from a part that its name decides. `pytest --slow=2/15` runs part 2 (of 0 to 14) of the slow tests
alone, and `pytest --slow=all` runs every test.

A test is slow by `@pytest.mark.slow`. Of a function with many cases, `@pytest.mark.fast("1f1b-2", "looped-4")` names
the cases that are not. The last lines of a run say which other tests took more than 3 s of CPU time.
"""

import argparse
import gc
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

from support import browsing
from support.cpu_budget import CpuBudget

# If not all IPUs take part in a collective, XLA waits for a minute or for ever. Here it warns after 20 s and aborts
# after 40 s. A tenth of that would do on a quiet machine. But with 8 virtual IPUs and several test workers on 2 cores,
# a correct collective may wait for seconds, and an abort ends the whole test worker.
_XLA_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20 --xla_cpu_collective_call_terminate_timeout_seconds=40 "
    # Compiling is four fifths of the work. XLA splits a program into pieces to compile them in parallel, which adds
    # an eighth to it. That gains nothing here, because every core already has a test worker.
    "--xla_cpu_parallel_codegen_split_count=1"
)

# Programs that run for a moment are not worth optimising: this halves the CPU time of the tests. With --slow=all the
# programs are compiled as users' are.
_COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA ends the process at a flag that it does not know, and jaxlib 0.12 does not know this one any more.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    _COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# As many threads as `ipu_jax.configure(8)` gives XLA: one that waits in a collective is then never missed.
os.environ.setdefault("PJRT_NPROC", str(8 + (os.cpu_count() or 1)))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}".strip()
# Tests that want a record of their process for ipu-monitor say so.
os.environ["IPU_JAX_MONITOR"] = "off"
# Each worker and each process that a test starts would compile all modules to bytecode again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests and the processes that they start find no programs of earlier runs. Lines of files are in none.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

_TOO_LATE = "later than --slow-deadline"

_TOP = Path(__file__).parent
_THERE_BEFORE = {*os.listdir(_TOP), "__pycache__", "build", "dist", "site"}

# Every run is the same run: `make random` is the place for new cases. On a busy machine an example may take long.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def _slow(text: str) -> str:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if text in ("none", "all") or (found and int(found[1]) < int(found[2])):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither none, all nor a part such as 0/15 to 14/15")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        type=_slow,
        default="none",
        help="none: the fast tests (default); all: every test; K/N: part K of N of the slow tests alone",
    )
    parser.addoption(
        "--slow-deadline",
        type=float,
        metavar="SECONDS",
        help="start no test after this time, in seconds since 1970, and say how many did not run",
    )
    parser.addoption(
        "--budget",
        action="store_true",
        help="exit with status 1 if a test or the run takes more CPU time than it may",
    )


def pytest_configure(config: pytest.Config) -> None:
    # jax makes many objects that live on. By default, looking for garbage among them takes a tenth of the time.
    gc.set_threshold(100_000, 20, 20)
    if config.option.slow != "all" and _COMPILE_FAST not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {_COMPILE_FAST}"
    config.pluginmanager.register(CpuBudget(strict=config.option.budget))


def pytest_report_header(config: pytest.Config) -> str:
    slow = config.option.slow
    return "slow tests: " + (slow if slow in ("none", "all") else f"part {slow}, and no others")


def _mark_slow_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that their function's `fast` does not name as slow, and refuse a name that no case has."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        found = item.get_closest_marker("fast")
        if found is not None:
            function, _, case = item.nodeid.partition("[")
            case = case.removesuffix("]")
            unknown.setdefault(function, set(found.args)).discard(case)
            if case not in found.args:
                item.add_marker("slow")
    wrong = {function: names for function, names in unknown.items() if names}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no case has the name that the mark fast gives: {wrong}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow_cases(config, items)
    slow = config.option.slow
    if slow == "all":
        return
    part, parts = map(int, ("-1/1" if slow == "none" else slow).split("/"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    cases: Counter[str] = Counter()  # those seen of each slow function
    for item in items:
        if item.get_closest_marker("slow") is None:
            runs = slow == "none"
        else:
            function = item.nodeid.split("[")[0]
            runs = (zlib.crc32(function.encode()) + cases[function]) % parts == part
            cases[function] += 1
        (kept if runs else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    found = yield
    # Tests have no doctests. pytest would look for them in each file.
    if Path(__file__).parent / "tests" in file_path.parents:
        return [each for each in found if type(each) is pytest.Module]
    return found


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = item.config.option.slow_deadline
    if deadline is not None and time.time() > deadline:
        pytest.skip(_TOO_LATE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    yield
    # A test runs at the top of the checkout. A relative path that it writes to would stay there, and get into git.
    left = {name for name in os.listdir(_TOP) if not name.startswith(".")} - _THERE_BEFORE
    _THERE_BEFORE.update(left)  # later tests are not guilty
    assert not left, f"left at the top of the checkout: {', '.join(sorted(left))}; write below tmp_path"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
    if config.option.slow_deadline is not None:
        late = sum(_TOO_LATE in reason for reason in skipped)
        terminalreporter.write_line(f"{late} tests did not run: {_TOO_LATE}")
    if unseen := sum(browsing.MISSING in reason for reason in skipped):
        terminalreporter.write_line(f"{unseen} tests in a browser did not run: apt install chromium")
