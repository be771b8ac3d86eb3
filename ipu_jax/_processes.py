"""Read what Linux says of a process in /proc, and tell one process from a later one with the same number.

    3207-918273-3437d34c-4026531836
    pid  start  boot     pid namespace    Identity: no other process ever has all four

A number alone is given again to a later process, another container has numbers of its own, and another host's may be
the same. The start is in clock ticks since boot, which no change of the clock moves.

Nothing here imports jax.
"""

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Final, NamedTuple, Self

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_NAME: Final = re.compile(r"(\d{1,10})-(\d{1,20})-([0-9a-f]{8})-(\d{1,20})")
_PROC: Final = Path("/proc")


class Identity(NamedTuple):
    """Identify a process: its number and start time, the namespace of the number, and the boot of the time."""

    pid: int
    start: int
    boot: str
    namespace: int

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the identity that `str` has made a text of, or None if it has not.

        >>> Identity.parse("3207-918273-3437d34c-4026531836")
        Identity(pid=3207, start=918273, boot='3437d34c', namespace=4026531836)
        """
        found = _NAME.fullmatch(name)
        return found and cls(int(found[1]), int(found[2]), found[3], int(found[4]))

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.boot}-{self.namespace}"

    def counts_as(self, other: "Identity") -> bool:
        """Return whether both are numbers of the same host's boot and container, so that they can be compared."""
        return (self.boot, self.namespace) == (other.boot, other.namespace)


@dataclasses.dataclass(frozen=True)
class Process:
    """Hold what /proc says of a process.

    Attributes:
        pid: its number.
        letter: of its state, such as "R" (runs), "S" (sleeps), "T" (stopped), "Z" (has ended).
        start: when it began, in clock ticks since boot.
        cpu_seconds: of all its threads, so far.
        rss_bytes: its memory that is in RAM.
        uid: its user's number.
    """

    pid: int
    letter: str
    start: int
    cpu_seconds: float
    rss_bytes: int
    uid: int

    @property
    def age(self) -> float:
        """Return the seconds since it began. A time for which the host was suspended counts."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start / _TICKS


def process(pid: int) -> Process | None:
    """Return what /proc says of a process, or None if there is none, or it is hidden from this user.

    >>> own = process(os.getpid())
    >>> own.letter, own.uid == os.getuid(), own.cpu_seconds > 0
    ('R', True, True)
    """
    try:
        folder = _PROC / str(pid)
        uid = folder.stat().st_uid
        # the name, in parentheses, may contain spaces and parentheses
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        return Process(
            pid=pid,
            letter=fields[0].decode(),
            start=int(fields[19]),
            cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
            rss_bytes=int(fields[21]) * _PAGE,
            uid=uid,
        )
    except (OSError, ValueError, IndexError):
        return None


def living(identity: Identity) -> Process | None:
    """Return the process with this identity, which must count as one's own does, or None if it has ended."""
    found = process(identity.pid)
    return None if found is None or found.start != identity.start or found.letter in "ZXx" else found


def own_identity() -> Identity | None:
    """Return the identity of this process, or None if /proc cannot be read."""
    found = process(os.getpid())
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()[:8]
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return None
    return found and Identity(found.pid, found.start, boot, namespace)
