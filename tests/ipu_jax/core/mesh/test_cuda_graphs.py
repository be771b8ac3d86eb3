"""Test which flags `configure` gives XLA on a machine with an NVIDIA driver, which is only pretended here."""

import os
import re
import subprocess
import sys

import pytest

from ipu_jax import configure
from ipu_jax.core.mesh import cuda_graphs

GRAPHS = "--xla_gpu_enable_command_buffer="
REWRITER, ANNOTATOR = "fusion-dynamic-memcpy-rewriter", "dynamic-slice-annotator"
PASSES = f"{REWRITER},{ANNOTATOR}"


@pytest.mark.slow
def test_xla_knows_the_flags_and_leaves_out_the_users_passes_too(tmp_path):
    """XLA ends a process that has an unknown flag."""
    code = f"""
import os
import jax
from ipu_jax import configure
from ipu_jax.core.mesh import cuda_graphs
cuda_graphs.driver_version = lambda: {cuda_graphs._DRIVER}
print(len(configure(2)), jax.jit(lambda x: x + 1)(1))
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {"XLA_FLAGS": f"--xla_disable_hlo_passes=a,b --xla_dump_to={tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr
    options = next(tmp_path.glob("*debug_options")).read_text()
    assert {*re.findall(r'xla_disable_hlo_passes: "(.*)"', options)} == {"a", "b", REWRITER, ANNOTATOR}
    assert "xla_gpu_graph_min_graph_size: 1\n" in options


@pytest.mark.parametrize(
    ("wanted", "driver", "platforms", "flags", "are_set"),
    [
        (None, 12030, None, "", True),
        (None, 13000, "cuda,cpu", "--xla_dump_to=d", True),
        (True, 12080, "gpu", "", True),
        (False, 12080, None, "", False),
        (None, None, None, "", False),
        (True, None, None, "", False),
        (None, 12080, "cpu", "", False),
        (True, 12080, "tpu", "", False),
        (None, 12080, None, f"{GRAPHS}FUSION", False),  # the user's own
    ],
)
def test_flags_are_set_where_an_nvidia_gpu_may_be_used(wanted, driver, platforms, flags, are_set, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "driver_version", lambda: driver)
    monkeypatch.setenv("XLA_FLAGS", flags)
    cuda_graphs.use_cuda_graphs(wanted, platforms)
    found = os.environ["XLA_FLAGS"]
    assert found.startswith(flags)
    assert (found != flags) == are_set
    assert not are_set or f"{GRAPHS}FUSION" in found


@pytest.mark.parametrize(
    ("users", "missing"),
    [
        ("", {"command_buffer": "FUSION,", "graph_size": "1", "passes": PASSES}),
        # a value of the user stays; without loops in graphs the others serve nothing
        (f"{GRAPHS}FUSION,WHILE", {"graph_size": "1", "passes": PASSES}),
        (f"{GRAPHS}FUSION", {}),
        (GRAPHS, {}),
        ("--xla_gpu_graph_min_graph_size=5", {"command_buffer": "FUSION,", "passes": PASSES}),
        # passes add up
        (f"{GRAPHS}WHILE --xla_disable_hlo_passes=a,b", {"graph_size": "1", "passes": f"a,b,{PASSES}"}),
        (
            f"{GRAPHS}WHILE --xla_disable_hlo_passes=a --xla_disable_hlo_passes=b",
            {"graph_size": "1", "passes": f"a,b,{PASSES}"},
        ),
        (f"{GRAPHS}WHILE --xla_disable_hlo_passes=a,{REWRITER}", {"graph_size": "1", "passes": f"a,{PASSES}"}),
        (f"{GRAPHS}WHILE --xla_disable_hlo_passes={ANNOTATOR},{REWRITER}", {"graph_size": "1"}),
        (" ".join(cuda_graphs.CUDA_GRAPH_FLAGS), {}),  # a second call adds nothing
    ],
)
def test_which_flags_are_missing_beside_a_users(users, missing):
    found = cuda_graphs.flags_beside(users)
    assert len(found) == len(missing)
    for (name, value), (expected_name, expected) in zip(found.items(), missing.items(), strict=True):
        assert expected_name in name
        assert value.startswith(expected) if expected.endswith(",") else value == expected


def test_an_old_driver_gives_a_warning_or_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "driver_version", lambda: 12020)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.warns(UserWarning, match=r"supports CUDA 12\.2, and loops in graphs need 12\.3"):
        cuda_graphs.use_cuda_graphs(None, None)
    cuda_graphs.use_cuda_graphs(False, None)
    with pytest.raises(ValueError, match=r"cuda_graphs=True.*12\.2.*newer driver.*cuda_graphs=False"):
        cuda_graphs.use_cuda_graphs(True, None)
    with pytest.raises(ValueError, match="cuda_graphs='on' is not a bool"):
        configure(2, cuda_graphs="on")  # pyright: ignore[reportArgumentType]
    assert os.environ["XLA_FLAGS"] == ""


def test_a_machine_without_a_driver_has_no_version(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_graphs.ctypes, "CDLL", missing)
    assert cuda_graphs.driver_version() is None
