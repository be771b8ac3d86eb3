"""Test where XLA's compilers are looked for."""

import pytest

from ipu_jax.run.ahead.compilers import has_compiler


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
        assert not has_compiler(platform)
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert has_compiler(platform)
