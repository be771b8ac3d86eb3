"""Test that programs for described chips stay out of jax's cache, from which they cannot be read again."""

import math
from types import SimpleNamespace
from typing import Any

import jax

from ipu_jax.run.ahead.compilers import compile_lowered

SHORTEST = "jax_persistent_cache_min_compile_time_secs"


def test_only_programs_for_devices_that_are_there_are_kept():
    before, seen = jax.config.values[SHORTEST], []
    lowered: Any = SimpleNamespace(compile=lambda **_: seen.append(jax.config.values[SHORTEST]))
    for there in ([], ["a device"]):
        client = SimpleNamespace(local_devices=lambda there=there: there)
        compile_lowered(lowered, SimpleNamespace(platform="tpu", client=client))
    assert seen == [math.inf, before]
    assert jax.config.values[SHORTEST] == before
