"""Sets jax up for every test and doctest: 8 virtual IPUs on the CPU, and no test that hangs in a collective.

It stands at the top, not in tests/, because the doctests of the packages need it as well. It runs before anything
starts a jax backend, which is when these settings count; processes that a test starts inherit them.

Of the tests marked slow a sample runs: one in eight of each function's cases, and of each function at least one; none
of those marked slow(sampled=False), which take half a minute or more. Each run draws another sample, by a seed that it
prints and that `--slow-seed` sets, so that in time all of them run. `pytest --slow=all` runs them all.

Compiling is four fifths of the work. The sample compiles without LLVM's optimizer, which saves a third of it and leaves
XLA's own passes as they are (fusion, buffers, the order of collectives); `--slow=all` compiles as users do.
"""

import os
import random
from typing import Any

import pytest

# When the IPUs of a collective don't all come, XLA waits for a minute or for ever. Here it says so after 20 s and ends
# after 40 s. A quiet machine does with a tenth of that; but 8 virtual IPUs and several test workers on 2 cores keep an
# honest collective waiting for seconds, and an abort ends the whole test worker.
_COLLECTIVES_FAIL_FAST = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20 --xla_cpu_collective_call_terminate_timeout_seconds=40"
)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COLLECTIVES_FAIL_FAST}".strip()
# A cached executable would hide what a test compiles.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

_ONE_IN = 8
_QUICK_COMPILES = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", choices=("sample", "all"), default="sample", help="which of the slow tests run")
    parser.addoption("--slow-seed", type=int, help="what draws the sample of the slow tests (random)")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slow_seed is None:
        given: dict[str, Any] = getattr(config, "workerinput", {})  # a worker of xdist takes part in its master's run
        config.option.slow_seed = given.get("slow_seed", random.SystemRandom().randrange(1000))
    if config.option.slow == "sample" and _QUICK_COMPILES not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {_QUICK_COMPILES}"


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
    cases: dict[str, list[pytest.Item]] = {}  # of each slow function
    for item in items:
        marker = item.get_closest_marker("slow")
        if marker and marker.kwargs.get("sampled") is False:
            left_out.append(item)
        elif marker:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for function, of_function in cases.items():
        first = random.Random(f"{config.option.slow_seed} {function}").randrange(min(_ONE_IN, len(of_function)))
        left_out += [item for i, item in enumerate(of_function) if i % _ONE_IN != first]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        without = set(left_out)
        items[:] = [item for item in items if item not in without]
