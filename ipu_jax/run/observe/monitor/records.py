"""Find the records that processes have written about themselves, and remove the records of dead processes.

    /run/user/1000/ipu_jax/3207-918273-3437d34c-4026531836/  \\
    process 3207, as psutil sees it                           >  Record

Everything in a folder is checked before it is trusted: owner, file type, size, and the names and types of its fields.
Anything that is not a record is ignored, and reported by name. `processes/record.py` writes the records.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.processes import beacons, record
from ipu_jax.distributed.processes.beacons import Reading
from ipu_jax.distributed.processes.identity import Identity, is_living

_MOST: Final = 1 << 53
_OF_USERS: Final = Path("/run/user")
_ROOT: Final = 0
_OF_LINUX: Final = ["cpu_affinity"] * hasattr(psutil.Process, "cpu_affinity")
_ASKED: Final = ("status", "uids", "create_time", "memory_info", "cpu_percent", *_OF_LINUX)


@dataclasses.dataclass(frozen=True)
class Ipu:
    """An IPU of a process: the device and, if known, its place in the mesh and its stages.

    With further axes an IPU is a group of devices, with an entry each. `further` is the place in the group.
    """

    id: int
    platform: str
    kind: str
    replica: int | None = None
    ipu: int | None = None
    stages: tuple[str, ...] = ()
    further: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Said:
    """Hold what is in said.json.

    Attributes:
        command: the words of the command line.
        run: the name of poprun's run and attempt, which its instances share; None without poprun.
        instance, instances: its number, and the number of instances.
        replicas, ipus_per_replica: of all instances; None before a mesh was made.
        ipus: the devices of this process's IPUs.
        planned_after, planned_updates: the process's number of updates at the start and at the end of its training;
            None outside of a training run with a known end.
        device_limit_bytes: how much memory the devices can hold; None if they do not report it.
    """

    command: tuple[str, ...]
    run: str | None
    ipus: tuple[Ipu, ...]
    instance: int = 0
    instances: int = 1
    replicas: int | None = None
    ipus_per_replica: int | None = None
    planned_after: int | None = None
    planned_updates: int | None = None
    device_limit_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """Hold what a process has written about itself, and what the system reports about it.

    Attributes:
        identity: of the process.
        process: the same process, for psutil.
        seen: its `_ASKED` attributes, as `psutil.Process.as_dict` returns them.
        said: the JSON.
        reading: the contents of its beacon; None if they cannot be read.
    """

    identity: Identity
    process: psutil.Process
    seen: dict[str, Json]
    said: Said
    reading: Reading | None

    @property
    def uid(self) -> int:
        """Return the number of its user."""
        return self.seen["uids"].effective


@dataclasses.dataclass(frozen=True)
class Ignored:
    """Name a file or folder that was found among the records, and why it was not read."""

    path: str
    reason: str


def find(own: Identity, before: Mapping[Identity, psutil.Process]) -> tuple[list[Record], list[Ignored]]:
    """Return the records of living processes, and what was ignored. Remove leftover records of this user.

    Args:
        own: the identity of this process; identities in records are compared with it.
        before: the processes of the previous look. psutil measures their shares of CPU time since then.
    """
    records: list[Record] = []
    ignored: list[Ignored] = []
    for folder, uid in _folders():
        try:
            with record.opened(folder, uid) as handle:
                for name in sorted(os.listdir(handle)):
                    found = _found(name, handle, uid, own, before)
                    if isinstance(found, Record):
                        records.append(found)
                    elif found is not None:
                        ignored.append(Ignored(str(folder / name), found))
        except FileNotFoundError:
            continue
        except OSError as error:
            ignored.append(Ignored(str(folder), error.strerror or str(error)))
    return records, ignored


def _folders() -> Iterator[tuple[Path, int]]:
    """Yield the folders that can contain records, each with its required owner. root sees the folders of all users."""
    chosen, uid = record.chosen_folder(), os.geteuid()
    if chosen is not None:
        yield chosen, uid
        return
    found = {_OF_USERS / str(uid) / "ipu_jax": uid, record.temporary_folder(uid): uid}
    runtime = record.runtime_folder()
    if runtime is not None:
        found[runtime] = uid
    if uid == _ROOT:
        for parent, prefix, rest in ((_OF_USERS, "", "ipu_jax"), (Path(tempfile.gettempdir()), "ipu_jax-", "")):
            with contextlib.suppress(OSError):
                for name in os.listdir(parent):
                    number = name.removeprefix(prefix)
                    if name.startswith(prefix) and number.isascii() and number.isdecimal():
                        found.setdefault(parent / name / rest, int(number))
    yield from found.items()


def _found(
    name: str, folder: int, uid: int, own: Identity, before: Mapping[Identity, psutil.Process]
) -> Record | str | None:
    """Return the record in a file of a folder, the reason to ignore the file, or None if its process has ended."""
    identity = Identity.parse(name)
    if identity is None:
        return "has no name of a record"
    if not identity.counts_as(own):
        return "is of another container or host, or from before a restart of this one"
    if not is_living(identity):
        if uid == os.geteuid():
            record.remove(name, folder)
        return None
    try:
        process = before.get(identity) or psutil.Process(identity.pid)
        seen = process.as_dict(_ASKED)
        if None in seen.values():
            return "names a process that cannot be inspected"
        if seen["uids"].effective != uid:
            return f"names a process of user {seen['uids'].effective}"
        with record.opened(name, uid, folder=folder, follow=True) as files:
            beacon = beacons.parsed(beacons.whole(lambda: record.content("beacon", files, uid)))
            values = json.loads(record.content("said.json", files, uid))
        if not isinstance(values, dict) or values.get("format") != record.FORMAT:
            return f"is not of format {record.FORMAT}: another version of ipu_jax has written it"
        return Record(identity, process, seen, _checked(Said, values), beacon)
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None  # the process has just ended, or is just starting to write it
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, TypeError, RecursionError):
        return "is not a record: it is damaged"


def _checked(kind: Any, value: Json) -> Json:
    """Return a JSON value as a type used in `Said`: a dataclass, a tuple of one type, a count or a text.

    Raises:
        TypeError: the value does not have this type.

    >>> _checked(Ipu, {"id": 0, "platform": "cpu", "kind": "cpu", "stages": ["mlp"]})
    Ipu(id=0, platform='cpu', kind='cpu', replica=None, ipu=None, stages=('mlp',), further=())
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind).items()
        return kind(**{name: _checked(hint, value[name]) for name, hint in hints if name in value})
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is tuple:
        value, kinds = tuple(_checked(kinds[0], one) for one in _checked(list, value)), (tuple,)
    if type(value) not in kinds or (type(value) is int and not 0 <= value <= _MOST):
        raise TypeError(f"{value!r} is not a {kind}")
    return value
