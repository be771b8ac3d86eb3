"""End a program before any of its changes to a folder of checkpoints, as a kill would, or by a real kill.

deaths = Deaths(monkeypatch.setattr)
with deaths.before(7):      # the seventh change of the folder does not happen, and no later one does
    checkpoints.save(state, now=True)
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Checkpoints, TrainOptions, make_train_step

CHANGES: Final = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
"""The functions of `os` that change everything except orbax's arrays."""


class DeathError(SystemExit):
    """Raised instead of a change: a thread that raises it ends without any message."""


class Deaths:
    """Counts the changes made by the main thread and by the thread that saves.

    Args:
        setattr_: a function such as `monkeypatch.setattr`.
        die: a function that ends this process; by default it does nothing, and `DeathError` is raised from then on.
        names: the names of the functions that count.

    Attributes:
        changes: the number of changes in the last `before`.
        is_dead: whether the change before which the program had to die has been reached.
    """

    def __init__(
        self,
        setattr_: Callable[[Any, str, Any], None] = setattr,
        die: Callable[[], None] = lambda: None,
        names: tuple[str, ...] = CHANGES,
    ):
        self.changes, self._at, self._is_armed, self._die = 0, 0, False, die
        for name in names:
            setattr_(os, name, self._watched(getattr(os, name)))

    @property
    def is_dead(self) -> bool:
        return self.changes >= self._at

    @contextlib.contextmanager
    def before(self, number: int) -> Iterator[None]:
        """Die before change `number`, counted from the beginning of a `with` block."""
        self.changes, self._at, self._is_armed = 0, number, True
        try:
            with contextlib.suppress(DeathError):
                yield
        finally:
            self._is_armed = False

    def _watched(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            if self._is_armed and threading.current_thread().name in ("MainThread", "checkpoint"):
                self.changes += 1
                if self.is_dead:
                    self._die()
                    raise DeathError
            return change(*args, **options)

        return watched


@functools.cache
def step_of() -> Any:
    return make_train_step(lambda w, rows: jnp.mean((rows @ w) ** 2), optax.sgd(0.1), TrainOptions(donate=False))


def state_of(step: Any, number: int, value: float, columns: int = 3) -> Any:
    """Return a state after `number` updates; all its weights have this value."""
    return step.restore({**step.whole(step.init(np.full((4, columns), value, np.float32))), "step": number})


def restored(folder: Path | str, columns: int = 3) -> tuple[int, float] | None:
    """Return the step and the value of the restored checkpoint, or None."""
    step = step_of()
    with Checkpoints(folder, step) as checkpoints:
        found = checkpoints.restore(state_of(step, 0, 0, columns))
    if found is None:
        return None
    (value,) = set(np.asarray(found.state.params).ravel().tolist())
    return found.step, value


def save_and_die(folder: str, number: int) -> None:
    """Save step 5, save it again with other weights, and kill this process before the second save's rename `number`."""
    step = step_of()
    deaths = Deaths(die=lambda: os.kill(os.getpid(), signal.SIGKILL), names=("rename",))
    with Checkpoints(folder, step, keep=1) as checkpoints:
        checkpoints.save(state_of(step, 5, 1), now=True)
        checkpoints.wait()
        with deaths.before(number):
            checkpoints.save(state_of(step, 5, 2), now=True)
            checkpoints.wait()


if __name__ == "__main__":
    save_and_die(sys.argv[1], int(sys.argv[2]))
