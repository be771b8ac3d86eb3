"""Kill an instance of `run-sharded-mnist` at a random moment; `--max-restarts` and the program's own flags resume it.

The printed losses, and every bit of the arrays of the last checkpoint, are compared with an undisturbed run.
"""

import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from faults_of.cases import pid_was_hit
from faults_of.runs import Started
from faults_of.trial import FOUND, GONE, TRIES, Result
from faults_of.twin import damaged_in, order_of

NAME: Final = "kill -9 under run-sharded-mnist"
EVERY: Final = 8
_FLAGS: Final = {
    "--pipeline-mode": "basic",
    "--epochs": "0.01",
    "--batch-size": "4",
    "--gradient-accumulation-count": "2",
    "--repeat-count": "1",
    "--checkpoint-every": str(EVERY),
    "--resume": "auto",
}
_LINE: Final = re.compile(r"(Epoch [\d.]+, Mean loss: .*|Test accuracy: [\d.]+%)")


def one_run(number: int, folder: Path, seed: int) -> Result:
    """Return the result of one run; its folder is kept if it falls short. The first call makes the undisturbed run."""
    cache, expected = folder / "mnist-cache", folder / "mnist-undisturbed"
    if not expected.exists():
        for _ in range(2):  # the second run has a cache
            shutil.rmtree(expected, ignore_errors=True)
            expected.mkdir()
            undisturbed = _start(expected, cache)
            if undisturbed.end():
                return Result("", problems=[f"undisturbed, it ended with {undisturbed.process.returncode}"])
            (expected / "seconds").write_text(str(undisturbed.ended - undisturbed.launched))
    seconds = float((expected / "seconds").read_text())
    for attempt in range(TRIES):
        dice = random.Random(f"{seed} {NAME} {number} {attempt}")
        own = folder / f"mnist-{number}-{attempt}"
        own.mkdir()
        victim, delay = dice.randrange(2), dice.uniform(0, 0.9 * seconds)
        result = Result(f"{delay:.2f} s after the start, instance {victim}")
        run = _start(own, cache, "--max-restarts", "1")
        pid = run.wait_for_pid(victim)
        if pid is None:
            result.problems.append("it did not start")
            break
        time.sleep(delay)
        if _kill(run, pid, result, victim):
            break
        run.end()
        shutil.rmtree(own)
    else:
        return Result("", problems=[f"{TRIES} moments in a row came after the end of the training"])
    if status := run.end():
        result.problems.append(f"poprun ended with {status}, not 0")
    if left := [*run.left_over(), *run.processes()]:
        result.problems.append(f"left: {left}")
        run.kill_all()
    result.problems += damaged_in(own / "checkpoints") + _differences(expected, own)
    if not result.judge():
        shutil.rmtree(own)
    return result


def _start(folder: Path, cache: Path, *options: str) -> Started:
    sizes = ["--num-replicas", "2", "--num-instances", "2", "--ipus-per-replica", "2"]
    own = [f"{name}={value}" for name, value in _FLAGS.items()]
    places = [f"--checkpoint-dir={folder / 'checkpoints'}", f"--executable-cache={cache}"]
    program = [sys.executable, "-m", "mnist_example.run_sharded_mnist", "--synthetic-data", "--no-progress"]
    return Started(["-v", *options, *sizes, *program, *own, *places], folder, "run")


def _kill(run: Started, pid: int, result: Result, victim: int) -> bool:
    """Kill an instance and judge what follows; return False if the instance had ended before."""
    saved = _saved_in(run)
    at = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    if not pid_was_hit(run, victim):
        return False
    gone_at = run.gone_at(0, 60)
    run.wait_for_error("attempt 1: restart 1 of 1")
    seen = run.seen(f"instance {victim} was ended by SIGKILL")
    result.found = None if seen is None else seen - at
    result.gone = None if gone_at is None else gone_at - at
    if gone_at is None:
        result.problems.append("some processes were still there after a minute")
    result.bounds = {"found": FOUND, "gone": FOUND + GONE, "lost": 2 * EVERY}
    report = (
        rf"^poprun: instance {victim} \(.*last finished step (\d+)\) was ended by SIGKILL|instance {victim} \(.*SIGKILL"
    )
    said = run.wait_for_error(report)
    if said is None:
        result.problems.append("poprun's report does not name the instance and the reason")
    run.end()
    resumed = [
        int(found[1].replace(",", "")) for line in run.lines if (found := re.search(r"after ([\d,]+) updates", line))
    ]
    if said is not None and said[1]:
        last = max(_saved_in(run))  # the calls of the evaluation after it are steps, too
        result.lost = min(int(said[1]), last) - (resumed[0] if resumed else 0)
    if saved and not resumed:
        result.problems.append(f"it was not resumed, although steps {saved} had been saved")
    return True


def _saved_in(run: Started) -> list[int]:
    return [order[0] for path in (run.folder / "checkpoints").glob("step-*") if (order := order_of(path))]


def _differences(expected: Path, own: Path) -> list[str]:
    """Return how the output and the last checkpoint of a run differ from the undisturbed run's."""
    lines = [
        {found[1] for line in (folder / "run.stdout").read_text().splitlines() if (found := _LINE.search(line))}
        for folder in (expected, own)
    ]
    wrong = [] if lines[1] == lines[0] else [f"it printed {sorted(lines[1])}, not {sorted(lines[0])}"]
    one, other = (_arrays(folder / "checkpoints") for folder in (expected, own))
    if one.keys() != other.keys():
        return [*wrong, f"its last checkpoint has {sorted(other)}, not {sorted(one)}"]
    return wrong + [f"{name} differs" for name in one if one[name].tobytes() != other[name].tobytes()]


def _arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays of the last checkpoint in a folder, as orbax alone reads them."""
    import orbax.checkpoint as ocp

    last = max(filter(order_of, folder.glob("step-*")), key=lambda path: order_of(path) or (0, 0))
    checkpointer = ocp.PyTreeCheckpointer()
    metadata: Any = checkpointer.metadata(last)
    names = metadata.item_metadata.tree
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    return checkpointer.restore(last, restore_args=how)
