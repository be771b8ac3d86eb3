"""Let XLA put guards into CUDA graphs, so that the host of a GPU takes no part in a tick.

A guard is a loop. By default the host starts each iteration of a loop, and reads the loop's predicate before. If loops
are part of command buffers, which are CUDA graphs, the GPU decides. Collectives stay outside: NCCL inside conditional
nodes of a graph can fail (NVIDIA/nccl#1986), and XLA measured graphs with collectives 30% slower (openxla/xla#35360).
"""

import ctypes
import os
import warnings
from typing import Final

CUDA_GRAPH_FLAGS: Final = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
    "--xla_gpu_graph_min_graph_size=1",
)
"""The flags of XLA that `configure` adds to the environment variable `XLA_FLAGS` where jax may use an NVIDIA GPU."""

_DRIVER: Final = 12030  # the first whose graphs have loops: CUDA 12.3


def use_cuda_graphs(wanted: bool | None, platforms: str | None) -> None:
    """Set `XLA_FLAGS` before the backend starts, if jax may use an NVIDIA GPU here. Flags of the user stay.

    Args:
        wanted: as `cuda_graphs` of `configure`.
        platforms: the platforms that jax may use, as in "cuda,cpu", or None for any.

    Raises:
        ValueError: `wanted` is True, and the driver is too old.
    """
    driver = driver_version()
    elsewhere = platforms and not {"cuda", "gpu"}.intersection(platforms.split(","))
    is_set = CUDA_GRAPH_FLAGS[0].partition("=")[0] in os.environ.get("XLA_FLAGS", "")
    if wanted is False or driver is None or elsewhere or is_set:
        return
    if driver < _DRIVER:
        reason = (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, and loops in graphs need 12.3"
        )
        if wanted:
            raise ValueError(f"cuda_graphs=True, but {reason}: install a newer driver, or give cuda_graphs=False")
        warnings.warn(f"{reason}: the host reads a predicate for each task of a tick", stacklevel=3)
        return
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *CUDA_GRAPH_FLAGS]).strip()


def driver_version() -> int | None:
    """Return the CUDA version that this machine's NVIDIA driver supports, such as 12030 for 12.3; None without one."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else version.value
