"""Test that transfers over the network between TPU slices are read from a program's text."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipu_jax.chips import Program
from ipu_jax.run.ahead.kinds import KINDS
from ipu_jax.run.ahead.paper import rows_of

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


@dataclasses.dataclass(frozen=True)
class Chip:
    """Stands in for a chip of one of two slices, each a row of two."""

    id: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    platform: str = "tpu"


def mesh_of(replicas: int, ipus: int) -> Any:
    chips = [Chip(100_000 * (1 + s) + k, s, (k, 0, 0)) for s in range(2) for k in range(2)]
    devices = np.empty(4, object)
    devices[:] = chips
    return SimpleNamespace(devices=devices.reshape(replicas, ipus), axis_names=("replica", "ipu"))


def program(text: str) -> Program:
    compiled: Any = SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: None)
    return Program(compiled)


@pytest.mark.parametrize(("replicas", "ipus", "axis"), [(2, 2, "replica"), (1, 4, "ipu")])
def test_transfers_between_slices_are_collectives_over_the_network(replicas, ipus, axis):
    text = TEXT.replace("FIRST", PERMUTE).replace("SECOND", SUM)
    summed, sent = sorted(rows_of(program(text), mesh_of(replicas, ipus), KINDS["v5e"]), key=lambda row: row.op)
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
