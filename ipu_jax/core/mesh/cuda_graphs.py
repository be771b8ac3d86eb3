"""Let XLA put guards into CUDA graphs, so that the host of a GPU takes no part in a tick.

A guard is a loop. By default the host starts each iteration of a loop, and reads the loop's predicate before. If loops
are part of command buffers, which are CUDA graphs, the GPU decides. Collectives stay outside: NCCL inside conditional
nodes of a graph can fail (NVIDIA/nccl#1986), and XLA measured graphs with collectives 30% slower (openxla/xla#35360).
"""

import ctypes
import os
import warnings
from collections.abc import Sequence
from typing import Final

CUDA_GRAPH_FLAGS: Final = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
    "--xla_gpu_graph_min_graph_size=1",
    # they make copies whose place the host computes from a loop's counter, so that a scan over layers is in no graph:
    # the first is a pass of jax 0.10's XLA, the second one of jax 0.12's
    "--xla_disable_hlo_passes=fusion-dynamic-memcpy-rewriter,dynamic-slice-annotator",
)
"""The flags of XLA that `configure` adds to the environment variable `XLA_FLAGS` where jax may use an NVIDIA GPU."""

_GRAPHS, _PASSES = "xla_gpu_enable_command_buffer", "xla_disable_hlo_passes"
_DRIVER: Final = 12030  # the first whose graphs have loops: CUDA 12.3


def use_cuda_graphs(wanted: bool | None, platforms: str | None) -> None:
    """Set `XLA_FLAGS` before the backend starts, if jax may use an NVIDIA GPU here, as `flags_beside` says.

    Args:
        wanted: as `cuda_graphs` of `configure`.
        platforms: the platforms that jax may use, as in "cuda,cpu", or None for any.

    Raises:
        ValueError: `wanted` is True, and the driver is too old.
    """
    driver = driver_version()
    elsewhere = platforms and not {"cuda", "gpu"}.intersection(platforms.split(","))
    missing = flags_beside(given := os.environ.get("XLA_FLAGS", ""))
    if wanted is False or driver is None or elsewhere or not missing:
        return
    if driver < _DRIVER:
        reason = (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, and loops in graphs need 12.3"
        )
        if wanted:
            raise ValueError(f"cuda_graphs=True, but {reason}: install a newer driver, or give cuda_graphs=False")
        warnings.warn(f"{reason}: the host reads a predicate for each task of a tick", stacklevel=3)
        return
    os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{name}={value}" for name, value in missing.items())]).strip()


def flags_beside(given: str) -> dict[str, str]:
    """Return the flags that are missing beside a user's, so that XLA puts guards into CUDA graphs: names and values.

    The user's values stay. If the user's graphs have no loops, nothing is missing, since the other flags serve loops.

    Passes that XLA leaves out are a list. A second one in `XLA_FLAGS` adds to the first one, but as an option of a
    compilation a list replaces it. So the list here has the user's passes, too.

    Args:
        given: the user's flags, as in `XLA_FLAGS`.
    """
    ours, users = _named(CUDA_GRAPH_FLAGS), _named(given.split())
    if "WHILE" not in dict(users).get(_GRAPHS, "WHILE"):
        return {}
    passes_of = lambda flags: [name for flag, value in flags if flag == _PASSES for name in value.split(",")]
    missing = {name: value for name, value in ours if name not in dict(users)}
    passes = dict.fromkeys([*passes_of(users), *passes_of(ours)])
    are_left_out = len(passes) == len({*passes_of(users)})
    return missing if are_left_out else missing | {_PASSES: ",".join(passes)}


def _named(flags: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (flag.lstrip("-").partition("=") for flag in flags)]


def driver_version() -> int | None:
    """Return the CUDA version that this machine's NVIDIA driver supports, such as 12030 for 12.3; None without one."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else version.value
