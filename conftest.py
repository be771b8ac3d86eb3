"""Set jax up for every test and doctest: 8 virtual IPUs on the CPU, and no test that hangs in a collective.

This file is at the top, not in tests/, because the doctests of the packages need it as well. It runs before anything
starts a jax backend, since these settings have no effect afterwards. Processes that a test starts inherit them.

Only a sample of the tests marked slow runs. It has one in twenty of each function's cases, or one in k with
`slow(one_in=k)`, but at least one; if a function has only one case, it runs one time in five. Tests marked
slow(sampled=False), which take half a minute or more, are never in the sample. Each run draws another sample, by a seed
that it prints and that `--slow-seed` sets, so that in time all of them run. `pytest --slow=all` runs them all.
"""

import os
import random
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import settings

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
# A cached executable would hide what a test compiles.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

_ONE_IN, _ALONE_ONE_IN = 20, 5

settings.register_profile("any load", deadline=None)  # on a machine with other work an example may take long
settings.load_profile("any load")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", choices=("sample", "all"), default="sample", help="which of the slow tests run")
    parser.addoption("--slow-seed", type=int, help="what draws the sample of the slow tests (random)")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slow_seed is None:
        given: dict[str, Any] = getattr(config, "workerinput", {})  # a worker of xdist uses the seed of its master
        config.option.slow_seed = given.get("slow_seed", random.SystemRandom().randrange(1000))
    if config.option.slow == "sample" and _COMPILE_FAST not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {_COMPILE_FAST}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["slow_seed"] = node.config.option.slow_seed


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.slow == "all":
        return "slow tests: all"
    return f"slow tests: a sample, drawn by --slow-seed {config.option.slow_seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.slow == "all":
        return
    left_out: list[pytest.Item] = []
    cases: dict[tuple[str, int], list[pytest.Item]] = {}  # the cases of each slow function
    for item in items:
        markers = list(item.iter_markers("slow"))  # the marks of the case itself, and those of its function
        if any(marker.kwargs.get("sampled") is False for marker in markers):
            left_out.append(item)
        elif markers:
            one_in = max(marker.kwargs.get("one_in", _ONE_IN) for marker in markers)
            cases.setdefault((item.nodeid.split("[")[0], one_in), []).append(item)
    for (function, one_in), of_function in cases.items():
        dice = random.Random(f"{config.option.slow_seed} {function}")
        first = dice.randrange(min(one_in, len(of_function)) if len(of_function) > 1 else _ALONE_ONE_IN)
        left_out += [item for i, item in enumerate(of_function) if i % one_in != first]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        without = set(left_out)
        items[:] = [item for item in items if item not in without]
