"""What jax compiles, kept in a folder: the second start of a program compiles nothing.

jax's own persistent cache does the work; alone it keeps only what took long to compile, which on a CPU is nothing.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import jax
from jax.experimental.compilation_cache import compilation_cache

_REQUEST: Final = "/jax/compilation_cache/compile_requests_use_cache"
_HIT: Final = "/jax/compilation_cache/cache_hits"


class ExecutableCache:
    """A context in which jax looks for every program in a folder before it compiles it, and keeps it there afterwards.

    A program is found again where the same jax compiles the same program with the same options for the same devices.

    Args:
        folder: made where there is none.

    Raises:
        ValueError: the path is something else than a folder, or one that can't be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, ExecutableCache(folder) as cache:
    ...     for _ in range(2):
    ...         _ = jax.jit(lambda x: 3 * x + 1).lower(1.0).compile()
    ...     cache.hits, cache.misses
    (1, 1)
    """

    def __init__(self, folder: str | os.PathLike[str]):
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--executable-cache {path} is not a folder: give one, or a name that is free")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--executable-cache {path} cannot be made ({error.strerror}): give another folder"
            ) from error
        self._settings: dict[str, Any] = {
            "jax_compilation_cache_dir": str(path),
            "jax_enable_compilation_cache": True,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        self._requests = self.hits = 0

    @property
    def misses(self) -> int:
        """How many programs were looked for and had to be compiled."""
        return self._requests - self.hits

    def __str__(self) -> str:
        return f"executable cache: {self.hits} hits, {self.misses} misses"

    def __enter__(self) -> "ExecutableCache":
        self._exchange_settings()
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        jax.monitoring.unregister_event_listener(self._count)
        self._exchange_settings()

    def _exchange_settings(self) -> None:
        before = {name: jax.config.values[name] for name in self._settings}
        for name, value in self._settings.items():
            jax.config.update(name, value)
        self._settings = before
        # whether there is a cache, and where, jax decides once, at its first program
        compilation_cache.reset_cache()

    def _count(self, event: str, **_: str | int) -> None:
        self._requests += event == _REQUEST
        self.hits += event == _HIT
