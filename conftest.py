"""Sets jax up for every test and doctest: 8 virtual IPUs on the CPU, and no test that hangs in a collective.

It stands at the top, not in tests/, because the doctests of the packages need it as well. It runs before anything
starts a jax backend, which is when these settings count; processes that a test starts inherit them.

Of the tests marked slow a sample runs: one in eight of each function's, and of each function at least one; none of
those marked slow(sampled=False), which take half a minute or more. `pytest --slow=all` runs them all.
"""

import os

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", choices=("sample", "all"), default="sample", help="which of the slow tests run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") == "all":
        return
    seen: dict[str, int] = {}  # of each slow function, how many of its cases came before
    left_out = []
    for item in items:
        marker = item.get_closest_marker("slow")
        if marker and marker.kwargs.get("sampled") is False:
            left_out.append(item)
        elif marker:
            function = item.nodeid.split("[")[0]
            seen[function] = seen.get(function, -1) + 1
            if seen[function] % _ONE_IN:
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
