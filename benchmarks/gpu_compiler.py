"""Compile pipelines for H100s that are not there, and count the loops whose predicate the host reads in each tick.

XLA's compiler for NVIDIA GPUs is in jax's plugin, and needs no GPU but the assembler `ptxas`. The flags of XLA are read
once, and TPUs need other ones, so `chips.py` runs `main` in a process of its own. It takes pairs of a schedule and
"basic" or "concurrent", and prints a line of JSON for each.

    AOT_CUDA=FOLDER python benchmarks/chips.py --only h100

The folder contains what this installs, for the version of jax that is used:

    pip install --no-deps --target FOLDER jax-cuda12-plugin==V jax-cuda12-pjrt==V nvidia-cuda-nvcc-cu12==12.9.*
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Final

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from chips import compile_pipeline, mlp
from ipu_jax.options import CUDA_GRAPH_FLAGS

IPUS: Final = 4
NEEDS_CUDA: Final = "XLA's compiler for NVIDIA GPUs: see benchmarks/gpu_compiler.py, and set AOT_CUDA"

# Without the driver's versions, XLA takes it for an old one whose graphs have no loops.
_H100: Final = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  driver_version: "12.9.0"
  kernel_mode_driver_version: "575.51.3"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def cuda_folder() -> Path | None:
    """Return the folder that the environment variable AOT_CUDA names, if it contains the compiler; else None."""
    folder = Path(os.environ.get("AOT_CUDA", "."))
    return folder if (folder / "jax_plugins").is_dir() and "AOT_CUDA" in os.environ else None


def main() -> int:
    folder = cuda_folder()
    if folder is None:
        print(f"gpu_compiler.py: needs {NEEDS_CUDA}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as dump:
        nvcc = folder.absolute() / "nvidia" / "cuda_nvcc"
        flags = [
            *CUDA_GRAPH_FLAGS,
            "--xla_gpu_autotune_level=0",  # there is no GPU to try kernels on
            "--xla_gpu_enable_triton_gemm=false",
            f"--xla_gpu_cuda_data_dir={nvcc}",
            f"--xla_dump_to={dump}",
            "--xla_dump_hlo_as_text",
        ]
        os.environ |= {"XLA_FLAGS": " ".join(flags), "PATH": f"{nvcc / 'bin'}:{os.environ['PATH']}"}
        sys.path.insert(0, str(folder))
        jax.config.update("jax_platforms", "cpu")
        topology = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=f"1x1x{IPUS}")
        chosen = np.array(topology.devices).reshape(1, IPUS)
        mesh = Mesh(chosen, ("replica", "ipu"), axis_types=(AxisType.Auto,) * 2)
        for schedule, mode in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
            compile_pipeline(mlp(), mesh, schedule, concurrent=mode == "concurrent")
            newest = max(Path(dump).glob("*thunk_sequence_after_thunk_passes.txt"), key=os.path.getmtime)
            print(json.dumps({"schedule": schedule, "mode": mode, **loops_of(newest.read_text())}), flush=True)
    return 0


def loops_of(thunks: str) -> dict[str, int]:
    """Return how many scans XLA's sequence of thunks has, and how many loops in them are in and outside CUDA graphs.

    >>> loops_of('''
    ... 012: kWhile         [source | sink]
    ...   body:
    ...     000: kCommandBuffer [source       | next=038 (1)]
    ...         022: kWhile [source | sink]
    ...     031: kWhile         [source       | next=1 (1)]
    ... ''')
    {'scans': 1, 'in graphs': 1, 'outside graphs': 1}
    """
    counts = {"scans": 0, "in graphs": 0, "outside graphs": 0}
    graph: int | None = None  # the indentation of the graph around this line
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", thunks, re.MULTILINE):
        if graph is not None and len(indent) <= graph:
            graph = None
        if kind == "kCommandBuffer" and graph is None:
            graph = len(indent)
        elif kind == "kWhile":
            counts["in graphs" if graph is not None else "outside graphs" if indent else "scans"] += 1
    return counts
