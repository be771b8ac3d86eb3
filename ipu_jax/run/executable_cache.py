"""Keep compiled programs in a folder, so that the second start of a program compiles nothing.

jax's own persistent cache does the work. By default, however, it keeps only programs that took long to compile (on a
CPU, none), and its keys depend on the folder's name. It never repairs an entry that it cannot read. So this module
repairs the entry:

    jax cannot read an entry, and warns     ->   the entries with that program's name are set aside
    jax compiles, and writes the missing entry
    jax looks for the next program          ->   the other entries with that name are put back

Under poprun each instance has its own folder inside that folder, `popdist.own_cache`.
"""

import contextlib
import logging
import os
import re
import warnings
from types import TracebackType
from typing import Final

import jax
from jax.experimental.compilation_cache import compilation_cache

from ipu_jax.base.annotations import Json
from ipu_jax.base.cli.output_paths import writable_folder
from ipu_jax.distributed import popdist

_log = logging.getLogger(__name__)

_REQUEST: Final = "/jax/compilation_cache/compile_requests_use_cache"
_HIT: Final = "/jax/compilation_cache/cache_hits"
_UNREADABLE: Final = "Error reading persistent compilation cache entry for '"
_PROGRAM: Final = re.compile(re.escape(_UNREADABLE) + r"(.+?)': (.*)", re.DOTALL)
_ASIDE: Final = ".aside"


class ExecutableCache:
    """A context in which jax looks for a program in a folder before compiling it, and keeps compiled programs there.

    A program is found if the same jax has compiled the same program with the same options for the same devices, even if
    the folder has been renamed since. If an entry cannot be read, a warning is logged, and the program is compiled and
    its entry written again.

    Args:
        folder: the folder of the programs; it is made if it does not exist.

    Raises:
        ValueError: an empty name, something other than a folder, or a folder that can't be made or written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, ExecutableCache(folder) as cache:
    ...     for _ in range(2):
    ...         _ = jax.jit(lambda x: 3 * x + 1).lower(1.0).compile()
    ...     cache.hits, cache.misses
    (1, 1)
    """

    def __init__(self, folder: str | os.PathLike[str]):
        whole = writable_folder("the executable cache", folder)
        self._folder = writable_folder("the executable cache", popdist.own_cache(whole))
        self._settings: dict[str, Json] = {
            "jax_compilation_cache_dir": str(self._folder),
            "jax_enable_compilation_cache": True,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
            # XLA's own caches would be in the folder too, and their path would be part of jax's keys
            "jax_persistent_cache_enable_xla_caches": "none",
        }
        self._requests = self.hits = 0
        self._context = contextlib.ExitStack()

    @property
    def misses(self) -> int:
        """Return the number of programs that were looked for and had to be compiled."""
        return self._requests - self.hits

    def __str__(self) -> str:
        return f"executable cache: {self.hits} hits, {self.misses} misses"

    def __enter__(self) -> "ExecutableCache":
        with contextlib.ExitStack() as context:
            self._put_back()  # entries that a killed process left set aside
            self._exchange_settings()
            context.callback(self._exchange_settings)
            jax.monitoring.register_event_listener(self._count)
            context.callback(jax.monitoring.unregister_event_listener, self._count)
            context.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("always", message=re.escape(_UNREADABLE))
            others = warnings.showwarning
            warnings.showwarning = lambda message, *where, **how: (
                self._set_aside(str(message)) or others(message, *where, **how)
            )
            context.callback(self._put_back)
            self._context = context.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._context.close()

    def _exchange_settings(self) -> None:
        before = {name: jax.config.values[name] for name in self._settings}
        for name, value in self._settings.items():
            jax.config.update(name, value)
        self._settings = before
        # without a reset, jax decides only once, at its first program, whether there is a cache and where
        compilation_cache.reset_cache()

    def _count(self, event: str, **_: str | int) -> None:
        if event == _REQUEST:
            self._put_back()
        self._requests += event == _REQUEST
        self.hits += event == _HIT

    def _set_aside(self, warning: str) -> bool:
        """Set entries aside if the warning says that one cannot be read, since jax does not overwrite existing files.

        Returns:
            Whether the warning says that; then it need not be shown.
        """
        found = _PROGRAM.fullmatch(warning)
        if found is None:
            return False
        program, reason = found.groups()
        _log.warning(
            "executable cache: an entry of %s in %s cannot be read (%s): it is compiled and written anew",
            program,
            self._folder,
            " ".join(reason.split()),
        )
        # the warning gives only the program's name, which several entries may share
        for entry in self._folder.iterdir():
            if re.fullmatch(re.escape(program) + r"-[0-9a-f]+-cache", entry.name):
                entry.rename(entry.with_name(entry.name + _ASIDE))
        return True

    def _put_back(self) -> None:
        """Put back the entries that were set aside and not written again."""
        for aside in self._folder.glob(f"*{_ASIDE}"):
            entry = aside.with_name(aside.name.removesuffix(_ASIDE))
            if entry.exists():
                aside.unlink()
            else:
                aside.rename(entry)
