"""Give each test records of its own."""

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("IPU_JAX_MONITOR", str(tmp_path / "records"))
    return tmp_path / "records"
