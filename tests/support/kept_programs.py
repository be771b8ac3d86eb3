"""Keep compiled programs between runs of the tests.

    .pytest_cache/d/programs-jax0.10.2-5e1f9a20/           whole entries, of all runs under one jax on one kind of CPU
    .pytest_cache/d/programs-jax0.10.2-5e1f9a20/run-4711/  of one process: links to those, and its own new entries

jax writes an entry in place, so that another process may read half of it. That's why each process has a folder of its
own while it runs, and gives its new entries to the others at its end. The processes that a test starts keep nothing.

jax looks a program up by the whole program with the names of its operations, the options it is compiled with, the
devices and its own version. So a changed line of the product that changes a program compiles it again. Only files and
line numbers do not count, and are left out of all programs.
"""

import contextlib
import os
import platform
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

LARGEST = 1 << 29  # bytes of all entries
_ENTRY, _RUN = "*-cache", "run-"


def kind_of_cpu() -> str:
    """Return a name for this CPU's instructions, since what is compiled for one CPU may not run on another."""
    told = Path("/proc/cpuinfo")
    flags = re.search(r"^(flags|Features)\b.*$", told.read_text(), re.MULTILINE) if told.exists() else None
    return f"{zlib.crc32(f'{platform.machine()} {flags and flags[0]}'.encode()):08x}"


class KeptPrograms:
    """The entries that this process reads and writes.

    Args:
        shared: the folder of all runs.
        largest: how many bytes of entries stay there at most; the oldest go first.
    """

    def __init__(self, shared: Path, largest: int = LARGEST):
        self.shared, self._largest = shared, largest
        self.own = shared / f"{_RUN}{os.getpid()}"

    def take(self, *, anew: bool = False) -> None:
        """Have jax read and write in this process's folder, with links to all entries, or with none."""
        shutil.rmtree(self.own, ignore_errors=True)  # of an earlier process with this number
        self.own.mkdir(parents=True)
        for entry in () if anew else self.shared.glob(_ENTRY):
            with contextlib.suppress(FileNotFoundError):  # another run may remove it
                os.link(entry, self.own / entry.name)
        use(self.own)

    def give(self) -> None:
        """Give the others the new entries, and remove what is too much or was left by a process that was killed."""
        use(None)
        for entry in self.own.glob(_ENTRY):
            with contextlib.suppress(FileExistsError):
                os.link(entry, self.shared / entry.name)
        shutil.rmtree(self.own, ignore_errors=True)
        for folder in self.shared.glob(f"{_RUN}*"):
            if not Path("/proc", folder.name.removeprefix(_RUN)).exists():
                shutil.rmtree(folder, ignore_errors=True)
        room = self._largest
        for _, size, entry in sorted(_written(self.shared), reverse=True):
            room -= size
            if room < 0:
                entry.unlink(missing_ok=True)


def _written(folder: Path) -> list[tuple[float, int, Path]]:
    found: list[tuple[float, int, Path]] = []
    for entry in folder.glob(_ENTRY):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat()
            found.append((status.st_mtime, status.st_size, entry))
    return found


def use(folder: Path | None) -> None:
    """Have jax keep its programs in a folder, or keep none."""
    import jax  # not at the top: pytest's own process with workers needs no jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": None if folder is None else str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_persistent_cache_enable_xla_caches": "none",
        "jax_compilation_cache_include_metadata_in_key": True,
        "jax_traceback_in_locations_limit": 0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Compile all programs anew, and keep none.

    A profile distinguishes programs by a number that programs of several processes have in common.
    """
    import jax

    before: str | None = jax.config.values["jax_compilation_cache_dir"]
    use(None)
    try:
        yield
    finally:
        use(Path(before) if before else None)
