"""Describe chips that are not there, and compile for them: XLA's compilers for TPU and NVIDIA GPUs need no chip.

    devices = describe("v5e:2x4")              8 devices to make a mesh of; nothing can be put on them
    compile_lowered(step.lower(...), devices)  what XLA makes of the program

The compiler for TPU is in the wheel libtpu. The one for GPUs is in jax's CUDA plugin and needs NVIDIA's assembler, too.
They are in the folders that AOT_TPU and AOT_CUDA name, beside the environment (`make aot`), or among its packages.
"""

import contextlib
import importlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
from jax.experimental import topologies

from ipu_jax.base import status
from ipu_jax.base.annotations import Device, Json
from ipu_jax.base.checks import check_count
from ipu_jax.core.compiled.program import compiled_for
from ipu_jax.core.mesh.cuda_graphs import flags_beside
from ipu_jax.core.mesh.devices import environment, is_described
from ipu_jax.run.ahead.kinds import TOPOLOGIES, topology_of

# libtpu asks the cloud which TPU this is, and lets only one process in, unless these are set
_ENVIRONMENT: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_SMALLEST: Final = (1, 1, 1)
# per platform: the chips, the files of the compiler, the variable that names its folder, its package, our extra
_COMPILERS: Final = {
    "tpu": ("TPU", ("libtpu/libtpu.so",), "AOT_TPU", "libtpu", "aot-tpu"),
    "gpu": (
        "NVIDIA GPUs",
        ("jax_plugins/xla_cuda12", "nvidia/cuda_nvcc/bin/ptxas"),
        *("AOT_CUDA", "jax-cuda12-pjrt", "aot-cuda"),
    ),
}
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


def describe(topology: str, *, slices: int = 1) -> list[Device]:
    """Return the devices of a machine that is not there, for `make_mesh(devices=)`. Programs compile for them.

    Args:
        topology: a TPU slice, as its kind and the chips along each side, such as "v5e:4x4", "v5p:4x4x4" or "v6e:2x4";
            or H100s, such as "h100x8", of which a host has 8.
        slices: how many TPU slices of this shape there are, connected by the network.

    Returns:
        `jax.Device`s that know their place. Arrays cannot be put on them.

    Raises:
        ValueError: there is no such topology, or XLA's compiler for its chips is not installed.
    """
    slices = check_count("slices", slices)
    kind, sides = topology_of(topology)
    if kind.name == "h100":
        if slices > 1:
            raise ValueError(f"slices={slices} is for TPUs: give all GPUs in the topology, such as h100x16")
        return _h100s("x".join(map(str, (1, *sides))))
    folder = str(_needed_folder("tpu"))
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    options: dict[str, Json] = {} if slices == 1 else {"num_slices": slices}
    if set(sides) == {1}:
        options["chips_per_host_bounds"] = _SMALLEST
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
        return sorted(devices, key=lambda device: device.id)  # XLA compiles for a part of them if it has the first ids
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].partition(": ")[2]
        raise ValueError(f"topology={topology!r} is not a TPU slice ({reason}): give one, as in {TOPOLOGIES}") from None


@status.during("compiling")
def compile_lowered(lowered: Any, device: Device) -> tuple[Any, str | None]:
    """Compile a lowered program for the platform of a device, which may be described.

    Returns:
        The compiled program, and for GPUs XLA's sequence of thunks as text, which shows what the host does; else None.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile it, such as if it does not fit into the memory of a TPU.
    """
    if device.platform != "gpu":
        return compiled_for(device, lowered), None
    path, options = os.environ.get("PATH", ""), dict[str, Json]()
    if is_described(device):
        nvcc = _needed_folder("gpu") / "nvidia" / "cuda_nvcc"
        path, options = f"{nvcc / 'bin'}{os.pathsep}{path}", _options_without_gpu(lowered, str(nvcc))
    with tempfile.TemporaryDirectory() as dump, environment("PATH", path):
        options |= {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        compiled = compiled_for(device, lowered, options)
        thunks = [*Path(dump).glob("*thunk_sequence_after_thunk_passes.txt")]
        return compiled, max(thunks, key=os.path.getmtime).read_text() if thunks else None


def _options_without_gpu(lowered: Any, nvcc: str) -> dict[str, Json]:
    """Return the options that stand for a GPU that is not there, and for the flags that `configure` would set."""
    # as options they replace the program's own, such as the passes that exact=True leaves out
    own = (f"--{name}={value}" for name, value in lowered._lowering._compiler_options_kvs)
    flags = flags_beside(" ".join([os.environ.get("XLA_FLAGS", ""), *own]))
    options: dict[str, Json] = {name: int(value) if value.isdigit() else value for name, value in flags.items()}
    # there is no GPU to try kernels on
    return options | {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False, "xla_gpu_cuda_data_dir": nvcc}


def version_of(platform: str) -> dict[str, str]:
    """Return the name and version of the package with XLA's compiler for "tpu" or "gpu"; nothing if it is not found."""
    folder = folder_of(platform)
    if folder is None:
        return {}
    package = _COMPILERS[platform][3]
    found = [*importlib.metadata.distributions(name=package, path=[str(folder)])]
    return {package: found[0].version} if found else {}


def folder_of(platform: str) -> Path | None:
    """Return the folder of packages with the compiler: the named one, the one of `make aot`, or of `sys.path`."""
    if platform not in _COMPILERS:
        return None
    _, files, variable, *_ = _COMPILERS[platform]
    named = os.environ.get(variable)
    beside = Path(sys.prefix) / variable.lower().replace("_", "-")
    folders = [Path(named).absolute()] if named else [beside, *map(Path, sys.path)]
    return next((folder for folder in folders if all((folder / file).exists() for file in files)), None)


def _needed_folder(platform: str) -> Path:
    folder = folder_of(platform)
    if folder is None:
        chips, *_, extra = _COMPILERS[platform]
        raise ValueError(f"XLA's compiler for {chips} is not installed: pip install 'ipu-jax[{extra}]', or make aot")
    return folder


def _h100s(shape: str) -> list[Device]:
    """Describe H100s by jax's plugin, and hide its message that this machine has no driver."""
    folder = str(_needed_folder("gpu"))
    is_found = folder in sys.path
    wanted: dict[str, Json] = {"platform": "cuda", "target_config": _H100, "topology": shape}
    # there is no driver whose version could be checked
    with environment("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1"), _no_stderr():
        try:
            return topologies.get_topology_desc(**wanted).devices  # jax registers an installed plugin, once
        except NotImplementedError:
            sys.path.insert(0, folder)
            importlib.import_module("jax_plugins.xla_cuda12").initialize()
            return topologies.get_topology_desc(**wanted).devices
        finally:
            if not is_found and folder in sys.path:
                sys.path.remove(folder)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Keep what C++ libraries write to stderr from the terminal."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
