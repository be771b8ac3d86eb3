"""Kill what is left of a run when its launcher is gone, and find the processes of a run.

A launcher that is killed with -9 cannot clean up. So each has a watcher: a small process in its own session that reads
a pipe. Only the launcher holds the other end, so the pipe ends when the launcher does, however it ends.

    launcher --["folder", "/tmp/poprun-x"], ["group", 1234], ..., ["bye"]--> watcher

Each message is a line of JSON, since a path may contain a newline. Without a "bye", the watcher kills the process
groups of the run and every process whose environment names its folder, and removes the folder.

This file runs on its own as a script, so it imports only the standard library.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

VARIABLE = "IPU_JAX_RUN_DIR"


def members(folder: str, groups: Iterable[int]) -> set[int]:
    """Return the living processes of a run: its process groups, and processes whose environment names its folder.

    Without /proc, which only Linux has, there is no way to know, and none is returned.
    """
    wanted, found = set(groups), set[int]()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and belongs(int(name), wanted, f"{VARIABLE}={folder}"):
                found.add(int(name))
    return found


def belongs(pid: int, groups: set[int], *variables: str) -> bool:
    """Return whether a living process is in one of the process groups, or has all the variables in its environment.

    Without /proc, only the group of a process is known.
    """
    try:
        if not os.path.exists("/proc/self"):
            return os.getpgid(pid) in groups
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the command's name, in parentheses, may contain anything
            letter, _, group = file.read().rpartition(b")")[2].split()[:3]
        if letter in (b"Z", b"X"):
            return False
        if int(group) in groups:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return {*map(os.fsencode, variables)} <= {*file.read().split(b"\0")}
    except (OSError, ValueError, OverflowError):  # it has ended, or is another user's
        return False


def kill(folder: str, groups: Iterable[int], seconds: float) -> set[int]:
    """Kill all processes of a run at once. Return processes still alive after `seconds`, such as in a broken driver."""
    groups, until = set(groups), time.monotonic() + seconds
    for group in groups:  # a whole group at once, so that none of its processes can start another
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    while True:
        left = members(folder, groups)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


def watch(commands: Iterable[str]) -> None:
    """Follow a launcher's messages until they end, and clean up if it did not say goodbye."""
    groups: dict[str, set[int]] = {}
    folder = ""
    for command in commands:
        try:
            word, *values = json.loads(command)
        except ValueError:
            break  # the launcher ended in the middle of the line
        match word, values:
            case "folder", [folder]:
                groups[folder] = set()
            case "group", [group]:
                groups[folder].add(group)
            case "done", [done]:
                groups.pop(done, None)
            case "bye", []:
                return
    for folder, of_folder in groups.items():
        kill(folder, of_folder, seconds=5)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin)
