"""Store the values that micro-batches need later on the same IPU: rings, which share buffers.

    ("stash", class)    residuals of F, until their last use     ("x", class)    activations that wait for F
    ("weight", class)   weight residuals, from B to W            ("dy", class)   gradients that wait for B

What a ring keeps of a micro-batch lies together, as a record in each buffer that the ring uses. A ring has room for as
many micro-batches as the schedule keeps in it. Rings of one kind, dtype and shape share a buffer whose rows are
micro-batches. So a TPU, which stores arrays in tiles, reads and writes a value where it lies, and a value that is split
over further mesh axes stays so; there, values of one shape in one ring have a buffer each, since XLA splits a buffer in
one way. A value that is whole on each device of an IPU (`_splits.py`) is split when it is stored: each device stores a
part, and an all-gather makes it whole when it is read. A task reads one kind of ring and writes another, because XLA
copies a buffer that one loop both reads and writes.

Where all IPUs run the guards of each other's tasks, buffers have a spare micro-batch at the end, which an IPU writes
when a task is not its own.

An IPU's rings follow one another in a buffer, whatever its stages are, and all IPUs have as much as the fullest one
needs. A buffer for a shape that few IPUs keep is mostly empty elsewhere. Where all buffers together would exceed flat
ones, into which rings of any shape go one after another, the worst shapes go into flat ones. On a TPU they may exceed
them by `SPARE`. CPUs have no tiles, and always flat buffers, unless there are further axes.

XLA's CPU backend compiles equal kernels once, and puts the constants of an index into the kernel that reads or writes
there. So on CPUs the numbers of a place are values that XLA does not know: reads and writes of equal values are equal
kernels, wherever they lie.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ipu_jax.base.annotations import Value
from ipu_jax.core.engine._splits import Split, Stored, constrained, stated_splits, stored_further
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import parts
from ipu_jax.core.schedules.lifetimes import Lifetimes, Spans

RingKey = tuple[Literal["stash", "weight", "x", "dy"], int]
SPARE = 0.10  # of the bytes of flat buffers


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of rings of one kind and dtype: rows of one shape, or flat, where each element is a row.

    Attributes:
        kind: the rings' kind.
        dtype: their dtype's name.
        row: the shape of a value without dims of 1, which a TPU may pad to 8 or 128; None: flat.
        platform: where it lies, such as "tpu".
        number: distinguishes buffers for values of one shape that may be split in different ways.
        stored: how rows are split further where they are stored; None: not at all.
    """

    kind: str
    dtype: str
    row: tuple[int, ...] | None
    platform: str
    number: int = 0
    stored: Stored | None = None

    @classmethod
    def of(cls, kind: str, value: Value, platform: str) -> "Buffer":
        """Return the buffer for rings of a value, which has a shape and a dtype."""
        return cls(kind, np.dtype(value.dtype).name, tuple(n for n in value.shape if n != 1), platform)

    @property
    def flat(self) -> "Buffer":
        return dataclasses.replace(self, row=None)

    @property
    def name(self) -> str:
        of_row = "flat" if self.row is None else "x".join(map(str, self.row))
        number = [str(self.number)] if self.number else []
        return ":".join([self.kind, self.dtype, of_row, *number])

    @property
    def nbytes_of_row(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self._held)

    @property
    def _held(self) -> tuple[int, ...]:
        """Return what a device has of a row."""
        return self.stored.held if self.stored else self.row or ()

    def rows_of(self, shape: tuple[int, ...]) -> int:
        """Return how many rows a value of this shape takes."""
        return math.prod(shape) if self.row is None else 1

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the array, which has room for these rows.

        It is longer than one micro-batch: XLA recognises a slice as long as its array as the whole array, and may read
        it before the guard.
        """
        return (int(rows) + 1,) if self.row is None else (max(int(rows), 2), *self.row)

    def nbytes(self, rows: int) -> int:
        """Return the bytes of the array without padding, and without a flat one's last element."""
        return self.nbytes_of_row * (int(rows) if self.row is None else self.shape(rows)[0])

    def padded_nbytes(self, rows: int) -> int:
        """Return the same with the padding to tiles that a TPU adds."""
        if self.row is None or self.platform != "tpu":
            return self.nbytes(rows)
        shape = (self.shape(rows)[0], *self._held)
        return np.dtype(self.dtype).itemsize * _padded([shape[dim] for dim in self._order(shape)])

    def write(self, array: Value, at: Value, value: Value) -> Value:
        """Return the array with a value written at row `at`."""
        if self.row is None:
            return lax.dynamic_update_slice(array, value.reshape(-1), (at,), allow_negative_indices=False)
        row = jnp.squeeze(value)
        if self.stored:  # XLA must not split what computes the row, too
            row = constrained(constrained(row, self.stored.given), self.stored.split)
        return lax.dynamic_update_index_in_dim(array, row, at, 0, allow_negative_indices=False)

    def read(self, array: Value, at: Value, shape: tuple[int, ...]) -> Value:
        """Return the value of this shape at row `at`."""
        if self.row is None:
            return lax.dynamic_slice(array, (at,), (math.prod(shape),), allow_negative_indices=False).reshape(shape)
        row = lax.dynamic_index_in_dim(array, at, keepdims=False, allow_negative_indices=False)
        if self.stored:
            row = constrained(constrained(row, self.stored.split), self.stored.given)
        return lax.expand_dims(row, [dim for dim, size in enumerate(shape) if size == 1])

    def pinned(self, array: Value) -> Value:
        """Return the array in its layout, so that a task which wants another one rearranges a row and not the array.

        Otherwise XLA gives each guard's loop a layout of its own, and copies the whole array between them in each tick.
        """
        # XLA's CPU backend has one layout, and jax.export refuses the call of a constraint
        if self.platform == "cpu" or self.row is None:
            return array
        return with_layout_constraint(array, Layout(self._order(array.shape)))

    def _order(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dims from the outermost one to the innermost: rows first, and last the two that pad the least."""
        dims = tuple(range(len(shape)))
        if self.platform != "tpu" or len(shape) < 3:
            return dims
        # of orders that pad the same the first one: the value's own, or else the one that moves the last dims the least
        pairs = [(a, b) for b, a in itertools.permutations(reversed(dims[1:]), 2)]
        orders = [(*(dim for dim in dims if dim not in pair), *pair) for pair in pairs]
        return min(orders, key=lambda order: _padded([shape[dim] for dim in order], least=8))


def _padded(shape: Sequence[int], least: int = 1) -> int:
    """Return the elements that an array of this shape, outermost dim first, takes on a TPU.

    XLA pads the last dim to a multiple of 128 and the one before to 1, 2, 4 or a multiple of 8 (compiled for v5e).
    """
    *outer, rows, columns = (1, *shape)
    tile = max(least, min(8, 1 << max(rows - 1, 0).bit_length()))
    return math.prod(outer) * -(-rows // tile) * tile * -(-columns // 128) * 128


class _Ring(NamedTuple):
    """The ring of one value: its buffer, the rows before it in a record there, the value's shape."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]


class _Records(NamedTuple):
    """The records of one ring in one buffer: per IPU the row of the first, and the rows of each."""

    bases: np.ndarray
    rows: int


class _Place(NamedTuple):
    """The place of an IPU's ring: how many records it has, per buffer `(first row, rows of a record)`, and offsets."""

    depth: Value
    records: dict[str, tuple[Value, Value]]
    offsets: list[Value]


Places = dict[RingKey, _Place]


class Stash:
    """Lay out the rings in the buffers."""

    def __init__(self, plan: Plan):
        # rings of all IPUs come first, so that they begin at the same row on each
        found = sorted(_rings_of(plan), key=lambda ring: None not in ring[1])
        self._plan = plan
        self._spans = {key: spans for key, spans, _ in found}
        depths = {key: {ipu: max(1, of.depth()) for ipu, of in spans.items()} for key, spans, _ in found}
        depth_of = lambda depths: [depths.get(ipu, depths.get(None, 0)) for ipu in range(plan.ipus)]
        self._depths: dict[RingKey, np.ndarray] = {key: np.array(depth_of(depths[key])) for key in depths}
        buffers = _buffers_of({key: values for key, _, values in found}, self._depths, plan)
        rings = [(buffer, self._depths[key]) for key in buffers for buffer in buffers[key]]
        self._is_split = parts(plan.axes) > 1
        if self._is_split:  # in a flat buffer a value loses its sharding over them
            flat = set()
        elif plan.platform == "cpu":
            flat = {buffer for buffer, _ in rings}
        else:
            flat = _flat(rings, SPARE if plan.platform == "tpu" else 0)
        self._rings: dict[RingKey, list[_Ring]] = {key: [] for key in self._depths}
        self._records: dict[RingKey, dict[Buffer, _Records]] = {}
        self._rows: dict[Buffer, np.ndarray] = {}
        self._spare: dict[Buffer, int] = {}
        for key, _, values in found:
            rows: dict[Buffer, int] = {}
            for value, shaped in zip(values, buffers[key], strict=True):
                buffer = shaped.flat if shaped in flat else shaped
                of_value, offset = buffer.rows_of(value.shape), rows.get(buffer, 0)
                self._rings[key].append(_Ring(buffer, offset, value.shape))
                self._spare[buffer] = max(self._spare.get(buffer, 0), of_value if plan.uniform else 0)
                rows[buffer] = offset + of_value
            none = np.zeros(plan.ipus, int)
            self._records[key] = {buffer: _Records(self._rows.get(buffer, none), rows[buffer]) for buffer in rows}
            for buffer, records in self._records[key].items():
                self._rows[buffer] = records.bases + records.rows * self._depths[key]

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the buffers' shapes by name."""
        return {
            buffer.name: jax.ShapeDtypeStruct(buffer.shape(self._length(buffer)), buffer.dtype) for buffer in self._rows
        }

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffers, the same on every IPU, without padding to tiles."""
        return sum(buffer.nbytes(self._length(buffer)) for buffer in self._rows)

    @property
    def padding(self) -> int:
        """Return the bytes that padding to tiles adds to the buffers."""
        return sum(buffer.padded_nbytes(self._length(buffer)) for buffer in self._rows) - self.nbytes

    def nbytes_of(self, ipu: int) -> int:
        """Return the bytes of the values that an IPU's own segments keep."""
        return sum(buffer.nbytes_of_row * int(rows[ipu]) for buffer, rows in self._rows.items())

    def held(self, ipu: int) -> list[int]:
        """Return the bytes of the values that an IPU keeps in each tick, at most."""
        lifetimes, held = self._held(ipu)
        return lifetimes.most_in_ticks(self._plan.schedule.ticks, [*held.values()]).tolist()

    def fullest(self, ipu: int) -> tuple[int, dict[RingKey, tuple[int, ...]]]:
        """Return the tick in which an IPU first keeps the most, and the micro-batches that each ring then has."""
        lifetimes, held = self._held(ipu)
        moment = lifetimes.fullest(self._plan.schedule.ticks, [*held.values()])
        return moment // lifetimes.per_tick, {key: spans.around(moment) for key, (spans, _) in held.items()}

    def sizes(self, key: RingKey) -> list[int]:
        """Return the bytes of each value that a ring keeps of a micro-batch."""
        return [ring.buffer.rows_of(ring.shape) * ring.buffer.nbytes_of_row for ring in self._rings[key]]

    def _held(self, ipu: int) -> tuple[Lifetimes, dict[RingKey, tuple[Spans, int]]]:
        """Return the spans of each ring on an IPU, with the bytes of a micro-batch there."""
        of_ipu = {key: spans.get(ipu, spans.get(None)) for key, spans in self._spans.items()}
        held = {key: (spans, sum(self.sizes(key))) for key, spans in of_ipu.items() if spans is not None}
        return Lifetimes(self._plan.schedule), held

    def pinned(self, buffers: Mapping[str, Value]) -> dict[str, Value]:
        """Return the buffers, each in its layout, unless XLA splits them over further axes.

        XLA's partitioner does not know how to split a layout constraint, and would gather the buffer in each task.
        """
        if self._is_split:
            return dict(buffers)
        return {buffer.name: buffer.pinned(buffers[buffer.name]) for buffer in self._rows}

    def __contains__(self, key: object) -> bool:
        return key in self._rings

    def places(self, ipu: Value) -> Places:
        """Return where this IPU's rings lie, for `read` and `write`. Call it outside the loop over ticks."""
        found: Places = {}
        for key, depths in self._depths.items():
            of_ipu = lambda numbers, holders=depths > 0: _of_ipu(numbers, holders, ipu)
            records = {buffer.name: (of_ipu(of.bases), of.rows) for buffer, of in self._records[key].items()}
            found[key] = _Place(of_ipu(depths), records, [ring.offset for ring in self._rings[key]])
        return lax.optimization_barrier(jax.tree.map(jnp.int32, found)) if self._plan.platform == "cpu" else found

    def write(
        self,
        buffers: Mapping[str, Value],
        key: RingKey,
        places: Places,
        microbatch: Value,
        values: list[Value],
        zero: Value,
    ) -> dict[str, Value]:
        """Return the buffers with a micro-batch's values written to an IPU's ring, or to no ring if it is -1.

        `zero` is the guard's traced 0.
        """
        written = dict(buffers)
        for ring, at, value in zip(self._rings[key], self._rows_at(key, places, microbatch, zero), values, strict=True):
            buffer, name = ring.buffer, ring.buffer.name
            row = jnp.where(microbatch < 0, int(self._rows[buffer].max()), at) if self._spare[buffer] else at
            written[name] = buffer.write(written[name], row, value)
        return written

    def read(
        self, buffers: Mapping[str, Value], key: RingKey, places: Places, microbatch: Value, zero: Value
    ) -> list[Value]:
        """Return the values that `write` wrote for a micro-batch."""
        rows = self._rows_at(key, places, microbatch, zero)
        return [
            ring.buffer.read(buffers[ring.buffer.name], at, ring.shape)
            for ring, at in zip(self._rings[key], rows, strict=True)
        ]

    def _length(self, buffer: Buffer) -> int:
        return int(self._rows[buffer].max()) + self._spare[buffer]

    def _rows_at(self, key: RingKey, places: Places, microbatch: Value, zero: Value) -> list[Value]:
        """Return the row of each value of a micro-batch."""
        place = places[key]
        # in a ring of one micro-batch the index would be a constant, and XLA might read it before the guard
        record = lax.rem(microbatch, jnp.int32(place.depth))
        firsts = {name: first + record * rows + zero for name, (first, rows) in place.records.items()}
        offsets = zip(self._rings[key], place.offsets, strict=True)
        return [lax.add(firsts[ring.buffer.name], jnp.int32(offset)) for ring, offset in offsets]


def _buffers_of(
    values: Mapping[RingKey, Sequence[Value]], depths: Mapping[RingKey, np.ndarray], plan: Plan
) -> dict[RingKey, list[Buffer]]:
    """Return the buffer of each value that each ring keeps, as if none were flat."""
    found = {key: [Buffer.of(key[0], value, plan.platform) for value in values[key]] for key in values}
    if parts(plan.axes) == 1:
        return found
    splits, said, rows = stated_splits(plan), dict[Buffer, set[Split | None]](), dict[Buffer, Value]()
    for key, buffers in found.items():
        # like values of unlike stages have the same number, and share a buffer: first those whose splits are known
        order = sorted(range(len(buffers)), key=lambda k, key=key: splits[key][k] is None)
        numbers = {k: [buffers[j] for j in order[:n]].count(buffers[k]) for n, k in enumerate(order)}
        found[key] = [dataclasses.replace(buffer, number=numbers[k]) for k, buffer in enumerate(buffers)]
        for buffer, split, value in zip(found[key], splits[key], values[key], strict=True):
            of_row = split and tuple(names for names, size in zip(split, value.shape, strict=True) if size != 1)
            said.setdefault(buffer, set()).add(of_row)
            rows[buffer] = rows.get(buffer, 0) + depths[key]
    stored = {
        buffer: stored_further(splits, buffer.shape(rows[buffer].max()), plan.axes, copies=plan.platform != "cpu")
        for buffer, splits in said.items()
    }
    return {key: [dataclasses.replace(buffer, stored=stored[buffer]) for buffer in found[key]] for key in found}


def _of_ipu(numbers: np.ndarray, holders: np.ndarray, ipu: Value) -> Value:
    """Return this IPU's number: a plain int where all holders have the same number."""
    distinct = set(numbers[holders].tolist())
    return distinct.pop() if len(distinct) == 1 else jnp.asarray(np.maximum(numbers, 1 - holders), jnp.int32)[ipu]


def _flat(rings: Iterable[tuple[Buffer, np.ndarray]], spare: float) -> set[Buffer]:
    """Return the buffers whose rings, with these depths per IPU, go into flat ones; `spare` is as in `SPARE`."""
    rows: dict[Buffer, Value] = {}
    for buffer, depths in rings:
        rows[buffer] = rows.get(buffer, 0) + depths
    own = {buffer: buffer.padded_nbytes(of.max()) for buffer, of in rows.items()}
    in_flat = {buffer: of * buffer.nbytes_of_row for buffer, of in rows.items()}
    held = {buffer.flat: np.zeros_like(of) for buffer, of in rows.items()}
    all_flat = {
        flat: np.sum([in_flat[buffer] for buffer in rows if buffer.flat == flat], axis=0).max() for flat in held
    }
    left = (1 + spare) * sum(all_flat.values()) - sum(own.values())
    flat: set[Buffer] = set()
    while left < 0:
        saved = {
            buffer: own[buffer] + held[buffer.flat].max() - (held[buffer.flat] + in_flat[buffer]).max()
            for buffer in rows
            if buffer not in flat
        }
        worst = max(saved, key=lambda buffer: (saved[buffer], -own[buffer]))
        left += saved[worst]
        held[worst.flat] = held[worst.flat] + in_flat[worst]
        flat.add(worst)
    return flat


def _rings_of(plan: Plan) -> Iterator[tuple[RingKey, dict[int | None, Spans], list[Value]]]:
    """Yield the key of each ring, what it holds when per IPU that has it (None: all), and a micro-batch's shapes."""
    segments, lifetimes = plan.segments, Lifetimes(plan.schedule)
    for c, members in enumerate(plan.classes):
        first, program = members[0], plan.programs[members[0]]
        if plan.schedule.phase(segments[first].first, "F") != "head":  # there, B follows F in the same task
            spans = {segments[i].place: lifetimes.stash(segments[i].first) for i in members}
            yield ("stash", c), spans, program.stash
        if plan.is_split(first):
            spans = {segments[i].place: lifetimes.weight_residuals(segments[i].first) for i in members}
            yield ("weight", c), spans, program.weight_residuals
        if ("x", c) in plan.tick:
            spans = {plan.waits_at(i, "x"): lifetimes.inbox(segments[i].first - 1, "F") for i in members}
            yield ("x", c), spans, jax.tree.leaves(plan.channels[plan.channel_of[first - 1]].message)
        if ("dy", c) in plan.tick:
            spans = {plan.waits_at(i, "dy"): lifetimes.inbox(segments[i + 1].first - 1, "B") for i in members}
            yield ("dy", c), spans, plan.channels[plan.channel_of[first]].carried("dx")
