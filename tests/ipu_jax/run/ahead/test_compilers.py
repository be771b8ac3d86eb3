"""Test where XLA's compilers are looked for, and that programs for described chips stay out of jax's cache.

They cannot be read from it again.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ipu_jax.run.ahead.compilers import compile_lowered, folder_of


@pytest.mark.parametrize(
    ("platform", "variable", "files"),
    [
        ("tpu", "AOT_TPU", ["libtpu/libtpu.so"]),
        ("gpu", "AOT_CUDA", ["jax_plugins/xla_cuda12/__init__.py", "nvidia/cuda_nvcc/bin/ptxas"]),
    ],
)
def test_the_folder_that_is_named_is_the_only_one_that_counts(platform, variable, files, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, str(tmp_path))
    for file in files:
        assert not folder_of(platform)
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert folder_of(platform)


def test_a_gpu_that_is_there_needs_no_options_but_for_what_the_host_does():
    def compile_(*, compiler_options):
        options.update(compiler_options)
        thunks = Path(compiler_options["xla_dump_to"]) / "module.thunk_sequence_after_thunk_passes.txt"
        thunks.write_text("000: kWhile")
        return "the program"

    options: dict[str, Any] = {}
    device = SimpleNamespace(platform="gpu", client=SimpleNamespace(local_devices=lambda: ["a device"]))
    assert compile_lowered(SimpleNamespace(compile=compile_), device) == ("the program", "000: kWhile")
    assert {*options} == {"xla_dump_to", "xla_dump_hlo_as_text"}


SHORTEST = "jax_persistent_cache_min_compile_time_secs"


def test_only_programs_for_devices_that_are_there_are_kept():
    before, seen = jax.config.values[SHORTEST], []
    lowered: Any = SimpleNamespace(compile=lambda **_: seen.append(jax.config.values[SHORTEST]))
    for there in ([], ["a device"]):
        client = SimpleNamespace(local_devices=lambda there=there: there)
        compile_lowered(lowered, SimpleNamespace(platform="tpu", client=client))
    assert seen == [math.inf, before]
    assert jax.config.values[SHORTEST] == before
