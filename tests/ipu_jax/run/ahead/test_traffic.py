"""Test what a program sends over a mesh of devices that are made up, with times worked out by hand.

Transfers over the network between TPU slices are read from the program's text.
"""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipu_jax.chips import Program, Row
from ipu_jax.run.ahead.kinds import KINDS, Kind, topology_of
from ipu_jax.run.ahead.traffic import rows_of

KIND = Kind("toy", "toy", memory=0, flops=1, memory_speed=1, clock=1, link=100, network=10)
ALL, IPUS, REPLICAS = "{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"
NEXT = "{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}"


@dataclasses.dataclass(frozen=True)
class Device:
    """A device in a line, unless it says something else."""

    id: int
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"


def mesh_of(*devices: Device, replicas: int = 2) -> Any:
    array = np.array(devices, object).reshape(replicas, -1)
    return SimpleNamespace(devices=array, axis_names=("replica", "ipu"))


def program(text: str) -> Program:
    compiled: Any = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: None)
    return Program(compiled)


GRID = mesh_of(*(Device(k, coords=(k % 4, k // 4)) for k in range(8)))  # a replica is a row of the grid


def rows(*sent: str, mesh: Any = GRID, kind: Kind | None = KIND) -> list[Row]:
    """Return the rows of a program that sends these, such as "f32[4] all-reduce {{0,1}}" and a place in the program."""
    lines = ["ENTRY %main (p: f32[4]) -> f32[4] {"]
    for k, text in enumerate(sent):
        result, op, groups, *place = text.split()
        name = "source_target_pairs" if "permute" in op else "replica_groups"
        lines.append(f'  %x.{k} = {result} {op}(%p), {name}={groups}, metadata={{op_name="{"".join(place)}"}}')
    return rows_of(program("\n".join([*lines, "}"])), mesh, kind)


@pytest.mark.parametrize(
    ("sent", "axis", "seconds"),
    [
        (f"f32[100] all-reduce {IPUS}", "ipu", 2 * 3 / 4 * 400 / 100),
        (f"f32[100] all-reduce {REPLICAS}", "replica", 2 * 1 / 2 * 400 / 100),
        (f"f32[100] all-gather {IPUS}", "ipu", 3 / 4 * 400 / 100),
        (f"f32[25] reduce-scatter {IPUS}", "ipu", 3 / 4 * 400 / 100),  # of 400 bytes, of which 100 are left
        (f"f32[100] all-to-all {IPUS}", "ipu", 3 / 4 * 400 / 100),
        (f"f32[100] collective-permute {NEXT}", "ipu", 400 / 100),
        ("f32[100] collective-permute {{0,4},{1,5}}", "replica", 400 / 100),
    ],
)
def test_the_axis_and_the_time_over_links_to_neighbours(sent, axis, seconds):
    (row,) = rows(sent)
    assert (row.axis, row.hops, row.seconds) == (axis, 1, pytest.approx(seconds))


def test_a_message_over_several_links_takes_as_often_as_long():
    (ring,) = rows("f32[100] collective-permute {{0,1},{1,2},{2,3},{3,0}}")
    assert (ring.hops, ring.seconds) == (3, 3 * 400 / 100)
    (both,) = rows("f32[100] all-reduce {{0,1,2,3,4,6,7}}")  # no box: from the end of a row to the next but one
    assert (both.axis, both.hops, both.links, both.over) == ("replica x ipu", 4, 1, "4 hops")
    assert both.seconds == pytest.approx(4 * 2 * 6 / 7 * 400 / 100)
    (unknown,) = rows(f"f32[100] all-reduce {ALL}", mesh=mesh_of(*(Device(k, platform="cpu") for k in range(8))))
    assert unknown.hops == 1


def box(*sides: int) -> list[tuple[int, ...]]:
    return [*itertools.product(*map(range, sides))]


SQUARE = box(4, 4)


# the links of a chip at a corner, to other chips of its group; by hand
@pytest.mark.parametrize(
    ("topology", "group", "links"),
    [
        ("v5e:2x2", box(2, 2), 2),
        ("v5e:2x4", box(2, 4), 2),
        ("v5e:4x4", SQUARE, 2),
        ("v5e:4x4", [SQUARE[k] for k in (0, 5, 3, *range(6, 16), 1, 2, 4)], 2),  # in any order
        ("v5e:4x4", [(2, y) for y in range(4)], 1),  # a ring of the mesh is a line of chips
        ("v5e:4x4", SQUARE[4:12], 2),
        ("v5e:4x4", [(0, 0), (0, 1)], 1),
        ("v5e:16x16", box(16, 16), 4),
        ("v6e:16x16", box(16, 2), 3),
        ("v5e:8x16", box(8, 16), 3),
        ("v5e:8x16", [(0, y) for y in range(16)], 2),
        ("v5e:8x16", [(0, y) for y in range(8)], 1),  # half of a ring is a line
        ("v5p:2x2x2", box(2, 2, 2), 3),
        ("v5p:4x4x4", box(4, 4, 4), 6),
        ("v5p:4x4x8", [(0, 0, z) for z in range(8)], 2),
        ("v5p:4x4x8", [(0, 0, z) for z in range(4)], 1),
        ("v5p:2x2x4", [(0, 0, z) for z in range(4)], 1),  # no whole cube of 4 x 4 x 4, so no side is a ring
    ],
)
@pytest.mark.parametrize(("op", "sent"), [("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)])
def test_chips_that_fill_a_box_use_links_along_each_side(topology, group, links, op, sent):
    kind, sides = topology_of(topology)
    places = box(*sides)
    mesh = mesh_of(*(Device(k, coords=place) for k, place in enumerate(places)), replicas=1)
    group = [*map(places.index, group)]
    n, elements = len(group), 1024
    text = "{{" + ",".join(map(str, group)) + "}}"
    (row,) = rows(f"f32[{elements}] {op} {text}", mesh=mesh, kind=kind)
    assert (row.hops, row.links) == (1, links)
    assert row.over == (f"{links} links" if links > 1 else "1 hop")
    whole = 4 * elements * (n if op == "reduce-scatter" else 1)  # its result is a part of the array
    assert row.seconds == pytest.approx(sent * (n - 1) / n * whole / (links * kind.link))


def test_other_collectives_and_scattered_chips_use_one_link_at_a_time():
    mesh = mesh_of(*(Device(k, coords=place) for k, place in enumerate(SQUARE)), replicas=1)
    every_second, neighbours = "{{0,2}}", "{{0,1},{1,2},{2,3}}"
    sent = (f"f32[100] all-reduce {every_second}", f"f32[100] collective-permute {neighbours}")
    summed, permuted = rows(*sent, mesh=mesh)
    assert (summed.hops, summed.links, summed.seconds) == (2, 1, 2 * 2 * 1 / 2 * 400 / 100)
    assert (permuted.hops, permuted.links, permuted.seconds) == (1, 1, 400 / 100)
    (exchanged,) = rows("f32[100] all-to-all {{0,1,2,3}}", mesh=mesh)
    assert (exchanged.links, exchanged.seconds) == (1, 3 / 4 * 400 / 100)


def test_a_part_of_a_slice_has_the_rings_of_the_slice(monkeypatch):
    """The chips of a mesh fill 4 x 4 x 4, whose sides would be rings; in a slice of 4 x 4 x 8 one of them is a line."""
    kind, _ = topology_of("v5p:4x4x8")
    whole = [Device(k, coords=place) for k, place in enumerate(box(4, 4, 8))]
    client = SimpleNamespace(devices=lambda: whole)
    monkeypatch.setattr(Device, "client", client, raising=False)
    line = [device for device in whole if device.coords and device.coords[2] < 4]
    text = "{{" + ",".join(map(str, range(4))) + "}}"
    (row,) = rows(f"f32[100] all-reduce {text}", mesh=mesh_of(*line, replicas=1), kind=kind)
    assert row.links == 1


@pytest.mark.parametrize(
    ("devices", "hops", "seconds"),
    [
        ([Device(k, coords=(k % 4, 0), slice_index=k // 4) for k in range(8)], None, 2 / 2 * 400 / 10),
        ([Device(k, process_index=k // 4, platform="gpu") for k in range(8)], None, 2 / 2 * 400 / 10),
        ([Device(k, coords=(k % 4, k // 4), process_index=k // 2) for k in range(8)], 1, 2 / 2 * 400 / 100),
    ],
    ids=["slices", "hosts of GPUs", "hosts of a slice"],
)
def test_what_leaves_a_slice_or_a_host_of_gpus_goes_over_the_network(devices, hops, seconds):
    (across,) = rows(f"f32[100] all-reduce {REPLICAS}", mesh=mesh_of(*devices))
    (inside,) = rows(f"f32[100] all-reduce {IPUS}", mesh=mesh_of(*devices))
    assert (inside.hops, inside.seconds) == (1, 2 * 3 / 4 * 400 / 100)
    assert (across.hops, across.seconds) == (hops, seconds)


def test_like_collectives_are_one_row_and_the_longest_is_first():
    y = f"f32[50] collective-permute {NEXT} f/ipu_jax.y.0/while/body/ppermute"
    sums = [f"f32[100] all-reduce {IPUS}", f"bf16[100] all-reduce {IPUS}", f"f32[100] all-reduce {REPLICAS}"]
    found = rows(y, *sums, y.replace("y.0", "dx.1"), y.replace("y.0", "y.2"))
    assert [(row.op, row.axis, row.runs, row.nbytes) for row in found] == [
        ("all-reduce", "ipu", 2, 600),  # 9 s
        ("permute y", "ipu", 2, 400),  # 4 s, as the next one: the order of the program
        ("all-reduce", "replica", 1, 400),
        ("permute dx", "ipu", 1, 200),
    ]
    assert found == sorted(found, key=lambda row: -(row.seconds or 0))
    by_bytes = rows(sums[2], *sums[:1], f"f32[400] all-gather {IPUS}", kind=None)
    assert [(row.nbytes, row.seconds) for row in by_bytes] == [(1600, None), (400, None), (400, None)]


def test_nothing_is_sent_by_a_device_to_itself():
    assert rows("f32[100] all-reduce {{0},{1}}", f"f32[0] all-reduce {ALL}") == []


TEXT = """\
ENTRY %main () -> f32[] {
  %token = token[] after-all()
  %recv = (bf16[64,256]{1,0}, u32[], token[]) recv(%token), FIRST
  %recv.1 = (f32[4,2]{1,0}, u32[], token[]) recv(%token), SECOND
  %while = f32[] while(%recv.2), condition=%no, body=%task
  %recv-done = (bf16[64,256]{1,0}, token[]) recv-done(%recv), channel_id=1
  %work = f32[8]{0} fusion(%x), backend_config={"estimated_cycles":"90000"}
  %recv-done.1 = (f32[4,2]{1,0}, token[]) recv-done(%recv.1), channel_id=3
}
"""
PERMUTE = '_xla_megascale_target={{100001->200000}},_xla_megascale_transfer_type="ONE_TO_ONE"'
SUM = '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"'


@pytest.mark.parametrize(("replicas", "axis"), [(2, "replica"), (1, "ipu")])
def test_transfers_between_slices_are_collectives_over_the_network(replicas, axis):
    slices = [Device(100_000 * (1 + s) + k, coords=(k, 0, 0), slice_index=s) for s in range(2) for k in range(2)]
    text = TEXT.replace("FIRST", PERMUTE).replace("SECOND", SUM)
    mesh = mesh_of(*slices, replicas=replicas)
    summed, sent = sorted(rows_of(program(text), mesh, KINDS["v5e"]), key=lambda row: row.op)
    assert (summed.op, summed.axis, summed.nbytes, summed.hops) == ("all-reduce", axis, 4 * 2 * 4, None)
    assert summed.seconds == pytest.approx(2 * (1 / 2) * 32 / 6.25e9)  # each chip with its like: rings of two
    assert (sent.op, sent.nbytes, sent.hops) == ("permute", 64 * 256 * 2, None)
    assert sent.seconds == pytest.approx(64 * 256 * 2 / 6.25e9)


def test_only_a_loop_until_its_end_hides_a_transfer():
    hidden, exposed = (
        TEXT.replace("FIRST", PERMUTE).replace("SECOND", "done"),
        TEXT.replace("FIRST", "done").replace("SECOND", SUM).replace("%while = f32[] while", "%no = f32[] fusion"),
    )
    assert [found.beside_work for found in program(hidden).collectives] == [True]
    assert [found.beside_work for found in program(exposed).collectives] == [False]


def test_a_transfer_within_the_host_is_none():
    assert program(TEXT.replace("FIRST", "channel_id=1, is_host_transfer=true").replace("SECOND", "")).collectives == []
