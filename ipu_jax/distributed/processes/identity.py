"""Distinguish a process from a later one with the same number.

    3207-918273-3437d34c-4026531836
    pid  start  boot     pid namespace    Identity: no other process ever has all four

A number alone is not enough: later processes reuse it, other containers have their own numbers, and other hosts may
have the same. The start is in clock ticks since boot, which no change of the clock affects. These few fields are read
from /proc without psutil, which training does not import.

macOS has no /proc. There the start is psutil's, in microseconds since 1970, the boot is a checksum of the host's name,
and the namespace is 0. Who changes the clock by a second or more while `ipu-monitor` watches makes it lose processes.

Nothing here imports jax.
"""

import os
import re
import zlib
from pathlib import Path
from typing import Final, NamedTuple, Self

_NAME: Final = re.compile(r"(\d{1,10})-(\d{1,20})-([0-9a-f]{8})-(\d{1,20})")
_PROC: Final = Path("/proc")


class Identity(NamedTuple):
    """Identify a process: its number and start time, the namespace of the number, and the boot of the start time."""

    pid: int
    start: int
    boot: str
    namespace: int

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the identity from the text that `str` makes of it, or None if the text is not an identity.

        >>> Identity.parse("3207-918273-3437d34c-4026531836")
        Identity(pid=3207, start=918273, boot='3437d34c', namespace=4026531836)
        """
        found = _NAME.fullmatch(name)
        return found and cls(int(found[1]), int(found[2]), found[3], int(found[4]))

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.boot}-{self.namespace}"

    def counts_as(self, other: "Identity") -> bool:
        """Return whether both numbers are from the same boot and container, so that they can be compared."""
        return (self.boot, self.namespace) == (other.boot, other.namespace)


def is_living(identity: Identity) -> bool:
    """Return whether the process is alive. Its identity must count as this process's own."""
    return _start(identity.pid) == identity.start


def own_identity() -> Identity | None:
    """Return the identity of this process, or None if /proc cannot be read, or if psutil is needed and fails."""
    start = _start(os.getpid())
    if start is not None and not (_PROC / "self").exists():
        return Identity(os.getpid(), start, f"{zlib.crc32(os.uname().nodename.encode()):08x}", 0)
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return None
    return None if start is None else Identity(os.getpid(), start, boot, namespace)


def _start(pid: int) -> int | None:
    """Return when a process began, in the unit of its `Identity`; None if it has ended or is hidden from this user."""
    if not (_PROC / "self").exists():
        return _start_by_psutil(pid)
    try:
        # the name, in parentheses, may contain spaces and parentheses
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _start_by_psutil(pid: int) -> int | None:
    import psutil  # takes a while, and is needed only without /proc

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1e6)
    except (psutil.Error, OSError):
        return None
