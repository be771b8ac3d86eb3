"""Compare the first call of a training step between the instances, and name what differs, before anything is compiled.

    instance 0   step(state, batch) -> trace, lower -> digests --+                  +--> compile, update
    instance 1   step(state, batch) -> trace, lower -> digests --+--> all are equal -+
                                                                 +--> not: exchange what differs, and raise on all

Without this, instances train to the end with unlike programs, weights or examples: jax runs on each instance what that
instance has compiled, and replicas that began differently, or learn at another rate, drift apart without a word.

The instances compare, in this order:

    batch      shapes and dtypes, and which updates of it are made
    state      shapes and dtypes of weights, optimizer's state, stages' state and average
    feed       the order of the examples, and where the batch begins
    program    the text of the lowered program, which says learning rate, options, schedule and code
    weights    checksums of the whole values that `init` or `restore` was given
    parts      otherwise checksums of the weights on the IPUs, where instances hold the same part

What only some instances have, such as a feed, is compared between those.
"""

import json
import re
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.distributed import board, popdist
from ipu_jax.distributed.errors import ABSENT, InstancesDifferError, difference
from ipu_jax.training.data.feed import FeedBatch
from ipu_jax.training.update._state_placer import StatePlacer
from ipu_jax.training.update.state import TrainState

_WHAT: Final = "the first update of a training step"
_SECONDS: Final = 1800.0  # one instance may trace for longer than another, as long as poprun lets a program compile
_MOST_LINES: Final = 200_000  # an exchange should have fewer bytes than a megabyte
_LONGEST: Final = 100_000
_BEFORE, _SHOWN = 60, 160  # characters of a line before the first that differs, and in all

_VALUE: Final = re.compile(r"%[\w#:]*")

_MENDS: Final = {
    "batch": "Give all instances batches of the same shapes, and the same updates to make",
    "state": "Make the same model and optimizer on all instances",
    "feed": "Give the feeds of all instances the same source and arguments",
    "program": "Their programs differ: look for another learning rate, schedule, option or code of a stage",
    "weights": "Give all instances the same weights and key, made from the same seed or by popdist.broadcast",
    "parts": "Give all instances the same state, as init and restore place it",
}

Texts = dict[str, str]


class Alike:
    """Compares the first call of a training step between the instances.

    Nothing is compared where a mesh has no devices of some instances, since these make no call, nor after
    `popdist.init(check_programs=False)`.

    Args:
        mesh: the mesh of the step.
        placer: places the states of the step.
        settings: returns the step's options and schedule as texts, which say why programs differ.
    """

    def __init__(self, mesh: Mesh, placer: StatePlacer, settings: Callable[[], Texts]):
        self._placer, self._settings = placer, settings
        count = board.process()[1]
        of_all = count > 1 and len({device.process_index for device in mesh.devices.flat}) == count
        self._is_due = of_all and popdist.compares_programs
        self._noted: tuple[weakref.ref[TrainState], Texts] | None = None

    def noted(self, state: TrainState, params: Tree, stages: Tree, key: Value) -> TrainState:
        """Remember the checksums of the whole values that a state was made from, and return the state."""
        if self._is_due:
            self._noted = weakref.ref(state), checksums({"params": params, "stages": stages, "key": key})
        return state

    @jax.transfer_guard("allow")  # checksums read the weights
    def check(self, state: TrainState, given: Batch, arrays: Batch, made: range, lower: Callable[[], Any]) -> None:
        """Compare a call with the other instances' calls, unless an earlier call was compared.

        Communicates one message of some hundred bytes from each instance to all others, and more if they differ.

        Args:
            state: the state of the call.
            given, arrays: the batch as given, and its arrays.
            made: the updates that the call makes.
            lower: returns the lowered program of the call.

        Raises:
            InstancesDifferError: the instances differ; the message names who, in what, and both values.
            InstancesMissingError: an instance did not make this call.
        """
        if not self._is_due:
            return
        text = lower().as_text()
        leaves = [leaf for layout in self._placer.layouts(state).values() for leaf in layout.leaves if leaf.array >= 0]
        is_noted = self._noted is not None and self._noted[0]() is state
        texts: dict[str, Texts | None] = {
            "batch": {**_shapes(arrays), "updates to make": f"{made.start} to {made.stop - 1}"},
            "state": {leaf.path: f"{leaf.dtype}{list(leaf.whole_shape)}" for leaf in leaves},
            "feed": {f"feed.{name}": str(value) for name, value in given.feed.items()}
            if isinstance(given, FeedBatch)
            else None,
            "program": {"program": f"{zlib.crc32(text.encode()):08x}"},
            "weights": self._noted[1] if self._noted is not None and is_noted else None,
            "parts": None if is_noted else parts(state.params),
        }
        digest = lambda of_kind: None if of_kind is None else zlib.crc32(json.dumps(of_kind).encode())
        sent = {kind: digest(of_kind) if kind != "parts" else of_kind for kind, of_kind in texts.items()}
        all_sent = _gathered(_WHAT, sent)
        for kind, mend in _MENDS.items():
            found = {i: one[kind] for i, one in enumerate(all_sent) if one[kind] is not None}
            if kind == "parts":
                problem = first_difference(found, common=True)
            elif len(set(found.values())) <= 1:
                problem = None
            elif kind == "program":
                problem = _difference_in("options", self._settings()) or _unlike_lines(text)
            else:
                problem = _difference_in(kind, texts[kind])
            if problem is not None:
                raise InstancesDifferError(
                    f"before the first update, {problem}. {mend}. popdist.init(check_programs=False) allows it"
                )
        self._is_due, self._noted = False, None


def first_difference(found: Mapping[int, Texts], *, common: bool = False) -> str | None:
    """Return who differs in the first name whose values are unlike, and how many further names are; None if all agree.

    Args:
        found: the texts of each instance.
        common: whether an instance without a name agrees with any value of it.

    >>> print(first_difference({0: {"seed": "5", "x": "1"}, 1: {"seed": "6", "x": "2"}, 2: {"seed": "5", "x": "1"}}))
    instance 1 has seed '6', instances 0 and 2 have '5' (1 more)
    >>> first_difference({0: {"a": "1"}, 1: {"b": "2"}}, common=True) is None
    True
    """
    problems: list[str] = []
    for name in dict.fromkeys(name for one in found.values() for name in one):
        of_name = {i: {name: one.get(name, ABSENT)} for i, one in found.items() if not common or name in one}
        problem = difference(of_name)
        problems += [] if problem is None else [problem]
    more = f" ({len(problems) - 1} more)" * (len(problems) > 1)
    return f"{problems[0]}{more}" if problems else None


def first_unlike(lines: Sequence[npt.NDArray[np.uint32]]) -> int:
    """Return the number of the first line that is not the same in all texts, from the checksums of their lines.

    >>> first_unlike([np.array([1, 2, 3], np.uint32), np.array([1, 2], np.uint32)])
    2
    """
    shortest = min(map(len, lines))
    unlike = np.any([one[:shortest] != lines[0][:shortest] for one in lines], axis=0)
    return int(np.argmax(unlike)) if unlike.any() else shortest


def around_difference(lines: Sequence[str]) -> list[str]:
    """Return of each line what is around the first character in which they differ.

    >>> around_difference(["%0 = dense<0.01>", "%0 = dense<0.02>"])
    ['%0 = dense<0.01>', '%0 = dense<0.02>']
    """
    of_places = enumerate(zip(*lines, strict=False))
    differs = next((at for at, letters in of_places if len({*letters}) > 1), min(map(len, lines)))
    start = max(0, differs - _BEFORE)
    return ["..." * (start > 0) + line[start : start + _SHOWN].strip() for line in lines]


def checksums(tree: Mapping[str, Tree]) -> Texts:
    """Return a checksum per leaf of the trees, by name and path, of leaves that this process can read.

    >>> checksums({"params": {"w": np.ones(2, np.float32)}})
    {"params['w']": 'checksum d5065190'}
    """
    return {
        f"{name}{jax.tree_util.keystr(path)}": _checksum(leaf)
        for name, of_name in tree.items()
        for path, leaf in jax.tree.leaves_with_path(of_name)
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
    }


def parts(params: Tree) -> Texts:
    """Return a checksum per part of the weights that devices of this process hold, by path and index of the part."""
    found: Texts = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        for shard in leaf.addressable_shards:
            bounds = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
            name = f"state.params{jax.tree_util.keystr(path)}[{', '.join(f'{a}:{b}' for a, b in bounds)}]"
            if name not in found:  # replicas of one process hold the same
                found[name] = _checksum(shard.data)
    return found


def _checksum(leaf: Value) -> str:
    array = np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return f"checksum {zlib.crc32(array.reshape(-1).view(np.uint8).data):08x}"


def _shapes(batch: Batch) -> Texts:
    leaves = jax.tree.leaves_with_path(batch)
    return {f"batch{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _gathered(what: str, value: Any) -> list[Any]:
    return [json.loads(one) for one in _exchanged(what, json.dumps(value).encode())]


def _difference_in(kind: str, own: Texts | None) -> str | None:
    """Return the first difference between the texts of the instances. All instances call it."""
    told = enumerate(_gathered(f"{_WHAT}, {kind}", own))
    return first_difference({i: one for i, one in told if one is not None})


def _exchanged(what: str, payload: bytes) -> list[bytes]:
    return board.gather(what, payload, seconds=_SECONDS, mend="popdist.init(check_programs=False) waits for none")


def _unlike_lines(text: str) -> str | None:
    """Return who has another line in its program than the others, and both lines. All instances call it.

    Names of values do not count, for an operation more gives other names to all that follow, and even to some before.
    """
    lines = [_VALUE.sub("%", line).strip().removeprefix("% = ") for line in text.splitlines()][:_MOST_LINES]
    sums = np.array([zlib.crc32(line.encode()) for line in lines], np.uint32).tobytes()
    at = first_unlike([np.frombuffer(one, np.uint32) for one in _exchanged(f"{_WHAT}, lines", sums)])
    own = lines[at][:_LONGEST] if at < len(lines) else ABSENT
    shown = around_difference([one.decode() for one in _exchanged(f"{_WHAT}, line", own.encode())])
    found = {i: {f"in line {at + 1} of its program": line} for i, line in enumerate(shown)}
    return difference(found) or "the instances have programs that use values in different places"
