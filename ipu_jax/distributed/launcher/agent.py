"""Run the instances of this host for a poprun on another host, which started this agent by ssh.

The agent reads commands and writes events, one line of JSON each. When the pipe from poprun ends, for whatever reason,
all instances are killed.

    python -m ipu_jax.distributed.launcher.agent

Nothing here imports jax.
"""

import json
import os
import sys
import time
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.launcher.events import Event, Note, line_of
from ipu_jax.distributed.launcher.launch import Launch
from ipu_jax.distributed.launcher.local import LocalHost
from ipu_jax.distributed.launcher.signals import STOPPING, Signals

_LOOK_EVERY: Final = 0.05
_ALIVE_EVERY: Final = 2.0
_MOST_WAITING: Final = 1 << 20
_AT_ONCE: Final = 1 << 16


class Agent:
    """Does what `poprun` asks for on a host."""

    def __init__(self) -> None:
        self._host = LocalHost("")
        self._rest = self._to_send = b""
        self._held = False
        self._say_alive_at = 0.0
        self._gone = False

    def run(self) -> None:
        """Serve until the pipe from poprun ends, or a signal arrives."""
        for handle in (0, 1):
            os.set_blocking(handle, False)
        signals = Signals()
        while not self._gone:
            if set(STOPPING) & set(signals.wait([0, *self._host.files()], _LOOK_EVERY)):
                break
            self._read()
            for event in self._host.events():
                self._say(event)
            if time.monotonic() >= self._say_alive_at:
                self._say(Note(""))
            self._flush()
            # if poprun does not read, the instances have to wait, so that nothing here grows without bound
            self._host.hold(self._held or len(self._to_send) > _MOST_WAITING)
        self._host.close()

    def _read(self) -> None:
        try:
            data = os.read(0, _AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone = True
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._do(json.loads(line))

    def _do(self, command: dict[str, Json]) -> None:
        match command:
            case {"do": "prepare", "bind": bind, "port": port}:
                self._host.prepare(bind, port)
            case {"do": "begin", "launch": values}:
                self._host.begin(_with_own_environment(values))
            case {"do": "send", "number": number, "instances": instances}:
                self._host.send(number, instances)
            case {"do": "ask_stacks", "instance": instance}:
                self._host.ask_stacks(instance)
            case {"do": "hold", "on": on}:
                self._held = on
            case {"do": "end", "patience": patience}:
                self._host.end(patience)
            case _:
                raise ValueError(f"{command!r} is nothing that an agent does: is poprun of the same version there?")

    def _say(self, event: Event) -> None:
        now = time.monotonic()
        self._say_alive_at = now + _ALIVE_EVERY
        self._to_send += line_of(event, now)

    def _flush(self) -> None:
        try:
            while self._to_send:
                self._to_send = self._to_send[os.write(1, self._to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            self._gone = True


def _with_own_environment(values: dict[str, Json]) -> Launch:
    return Launch.from_json({**values, "environment": {**os.environ, **values["environment"]}})


if __name__ == "__main__":
    Agent().run()
    sys.exit(0)
