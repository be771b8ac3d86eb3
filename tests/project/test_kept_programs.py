"""Test that compiled programs are kept between runs of the tests, and that no kept program hides a change."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from support.harness import on_ipus
from support.kept_programs import KeptPrograms, use

X = np.arange(8, dtype=np.float32)
SPLIT = P("ipu")


@pytest.fixture
def folder(tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    yield tmp_path
    use(before and Path(before))


def summed(factor=2.0, ipus=2, spec=SPLIT, collective=jax.lax.psum, name="first"):
    """Return a new program, which jax has not compiled in this process, under the same name each time."""

    @jax.named_scope(name)
    def program(x):
        return collective(factor * x.sum(), "ipu")

    return on_ipus(program, ipus, (spec,), P())


PROGRAM = (lambda: summed()(X), 56.0)
CHANGES = {
    "a constant": (lambda: summed(factor=2.0000002)(X), 28 * np.float32(2.0000002)),
    "another collective": (lambda: summed(collective=jax.lax.pmax)(X), 44.0),
    "a dtype": (lambda: summed()(X.astype(jnp.bfloat16)), 56.0),
    "a shape": (lambda: summed()(X[:6]), 30.0),
    "more IPUs": (lambda: summed(ipus=4)(X), 56.0),
    "a name": (lambda: summed(name="second")(X), 56.0),
    "a spec": (lambda: summed(spec=P())(X), 112.0),
}


def entries(folder):
    return {path.name for path in folder.glob("*-cache")}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_program_does_not_find_the_one_before(folder, change):
    (run, expected), (run_changed, expected_changed) = PROGRAM, CHANGES[change]
    use(folder)
    assert run() == expected
    kept = entries(folder)
    assert any("program" in name for name in kept)
    assert run() == expected
    assert entries(folder) == kept
    assert run_changed() == expected_changed
    assert len({name for name in entries(folder) - kept if "program" in name}) == 1
    assert run() == expected


def test_what_one_run_compiles_the_next_one_finds(folder, monkeypatch):
    hits: list[str] = []
    first = KeptPrograms(folder)
    first.take()
    assert summed()(X) == 56
    assert entries(folder) == set()
    first.give()
    kept = entries(folder)
    assert kept
    assert not first.own.exists()

    second = KeptPrograms(folder)
    second.take()
    listener = lambda event, **_: hits.append(event)  # noqa: E731
    jax.monitoring.register_event_listener(listener)
    assert summed()(X) == 56
    jax.monitoring.unregister_event_listener(listener)
    assert "/jax/compilation_cache/cache_hits" in hits
    second.give()
    assert entries(folder) == kept


def test_the_oldest_go_when_there_are_too_many_and_so_does_what_a_killed_run_left(folder):
    for k, name in enumerate(("old-cache", "new-cache", "newest-cache")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (k, k))
    killed = folder / "run-99999999"
    killed.mkdir()
    (killed / "half-cache").write_bytes(b"")
    kept = KeptPrograms(folder, largest=250)
    kept.take()
    kept.give()
    assert {path.name for path in folder.iterdir()} == {"new-cache", "newest-cache"}
