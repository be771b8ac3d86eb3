"""Say what has ended an attempt, in lines for the user: which instance, what it did, and its last words.

Nothing here imports jax.
"""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Final

from ipu_jax.distributed.launcher.culprits import EarlyEnd, Failure, Stuck

_MOST_LINES: Final = 40
_CAUSES: Final = {
    r"received data size doesn't match": "it received arrays of another size than it sent: do all instances have the "
    "same model, batches and options?",
    r"gloo context initialization failed.*(deadline|timed out)": "another instance did not reach their exchange: do "
    "all make the same calls, with the same options, such as checkpoints=?",
    r"heartbeat": "jax's service has missed the heartbeats of an instance, which was suspended or starved, or a clock "
    "has jumped: a restart helps (--max-restarts)",
}
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a driver, and cannot be interrupted",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended, but not collected by its parent",
    "X": "dead",
    "I": "idle",
}


def about_early_end(early: EarlyEnd, host: str, pid: int) -> list[str]:
    """Return the lines that describe an early end.

    >>> end = EarlyEnd(0, 1, None, 5, "trains, in step 6")
    >>> print(*about_early_end(end, "here", 77), sep="\\n")  # doctest: +ELLIPSIS
    instance 0 (host here, pid 77) ended its program after step 5, while instance 1 still trains, in step 6
      all instances must make the same steps and calls: look for what ends one of them early, such as ...
    """
    how = f"after step {early.finished}" if early.finished else "before its first step had finished"
    if early.status is not None:
        how = f"with status {early.status} {how}"
    return [
        f"instance {early.instance} (host {host}, pid {pid}) ended its program {how}, "
        f"while instance {early.other} still {early.doing}",
        "  all instances must make the same steps and calls: look for what ends one of them early, such as fewer "
        "examples on its host, or os._exit",
    ]


def signal_name(number: int) -> str:
    """Return the name of a signal.

    >>> signal_name(9), signal_name(99)
    ('SIGKILL', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def step_of(finished: int | None) -> str:
    """Return the progress of an instance in words.

    >>> step_of(None), step_of(0), step_of(12)
    ('no step is known', 'no step finished', 'last finished step 12')
    """
    if finished is None:
        return "no step is known"
    return f"last finished step {finished}" if finished else "no step finished"


def cause_of(said: Iterable[str]) -> str:
    """Return what has ended an instance, in words, if gloo or jax's service has said one of the known messages.

    >>> cause_of(["...", "[enforce fail at pair.cc:459] ... Received data size doesn't match expected size."])
    'it received arrays of another size than it sent: do all instances have the same model, batches and options?'
    """
    text = "\n".join(said)
    return next((words for known, words in _CAUSES.items() if re.search(known, text, re.IGNORECASE)), "")


def about_failure(
    failed: Failure, host: str, pid: int, finished: int | None, lines: Sequence[str], cause: str = ""
) -> list[str]:
    """Return the lines that describe a failure, with its known cause, and output that the user may not have seen."""
    where = f"instance {failed.instance} (host {host}, pid {pid}, {step_of(finished)})"
    status = failed.status
    if failed.error is not None:
        message = failed.error.message.strip().split("\n")[0]
        what = f"failed with {failed.error.type}{': ' if message else ''}{message}"
        if status:
            what += f" (exit status {status})"
    elif status is not None and status < 0:
        what = f"was ended by {signal_name(-status)}"
    elif status is not None and status > 128 and signal_name(status - 128).startswith("SIG"):
        what = f"exited with status {status}, as a shell does whose command {signal_name(status - 128)} has ended"
    else:
        what = f"exited with status {status}"
    return [f"{where} {what}{cause and ': '}{cause}", *quoted("its last lines", lines)]


def about_stall(stuck: Stuck, host: str, stacks: str, lines: Sequence[str]) -> list[str]:
    """Return the lines that describe a stuck instance, with its Python stacks and its last lines of output."""
    letter = stuck.letter
    where = f"instance {stuck.instance} (host {host}, pid {stuck.pid}, {step_of(stuck.finished)})"
    how_long = f"for {stuck.seconds:.1f} s; the limit is {stuck.limit:.3g} s ({stuck.rule})"
    state = f"{letter} ({_STATES[letter]})" if letter in _STATES else "unknown"
    said = [f"{where} is stuck: it {stuck.doing} {how_long}", f"  the process is in state {state}"]
    if letter == "T":
        said[-1] += ": something has sent it SIGSTOP or SIGTSTP; SIGCONT would continue it"
    frames = stacks.strip().splitlines()
    if frames:
        said += quoted("its Python stacks", frames)
    else:
        why = "a stopped process cannot write them" if letter == "T" else "its program does not write them"
        said.append(f"  its Python stacks are not known: {why}")
    return [*said, *quoted("its last lines", lines)]


def quoted(title: str, lines: Sequence[str]) -> list[str]:
    """Return quoted lines under a title; nothing if there are none."""
    left = len(lines) - _MOST_LINES
    more = [f"    and {left} more lines"] if left > 0 else []
    return [f"  {title}:", *(f"    {line}" for line in lines[:_MOST_LINES]), *more] if lines else []
