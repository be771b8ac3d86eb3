"""Test how the text of a program that was compiled for TPU is read, with a short program in the compiler's notation."""

from types import SimpleNamespace

import pytest

from tpu_compiler import Array, Compiled, libtpu_folder

PROGRAM = """HloModule jit_f, is_scheduled=true

%row (p: bf16[8,4,16], q: bf16[1,4,16]) -> bf16[8,4,16] {
  ROOT %write = bf16[8,4,16]{2,1,0:T(8,128)} dynamic-update-slice(%p, %q, %i, %i, %i)
}

%heads (p: bf16[8,4,16]) -> bf16[8,4,16] {
  %product = bf16[4,16]{1,0} fusion(%p), kind=kOutput, calls=%row, backend_config={"estimated_cycles":"100"}
  ROOT %moved = bf16[8,16,4]{2,1,0} copy(%p), backend_config={"estimated_cycles":"7"}
}

%other (p: bf16[8,4,16]) -> bf16[8,4,16] {
  ROOT %product.1 = bf16[4,16]{1,0} fusion(%p), kind=kOutput, calls=%row, backend_config={"estimated_cycles":"30"}
}

%tick (p: (s32[], bf16[8,4,16])) -> (s32[], bf16[8,4,16]) {
  %while.1 = bf16[8,4,16]{2,1,0} while(%a), condition=%c, body=%heads, metadata={op_name="f/ipu_jax.F.0/while"}
  %while.2 = bf16[8,4,16]{2,1,0} while(%a), condition=%c, body=%other, metadata={op_name="f/ipu_jax.F.1/while"}
  %sum = (bf16[4,16]{1,0}, f32[]) all-reduce(%x, %y), to_apply=%add
  ROOT %result = (s32[], bf16[8,4,16]{2,1,0}) tuple(%i, %while.2)
}

ENTRY %main (p: bf16[4,16]) -> f32[4] {
  %constant = s32[4,60]{1,0:T(4,128)} constant({...})
  %loop = (s32[], /*index=1*/bf16[8,4,16]{2,1,0}) while(%a), condition=%c, body=%tick, \
metadata={op_name="f/ipu_jax.plan.6bba.a041/while"}, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %sum.1 = f32[4]{0} all-reduce-start(%x), to_apply=%add
}
"""
RING = Array("bf16", (8, 4, 16))


@pytest.fixture
def program():
    memory = SimpleNamespace(generated_code_size_in_bytes=3, temp_size_in_bytes=4)
    return Compiled(SimpleNamespace(as_text=lambda: PROGRAM, memory_analysis=lambda: memory))


def test_cycles_are_those_of_the_slowest_ipu_and_of_all_trips_of_a_loop(program):
    assert (program.cycles_of("F"), program.cycles_of("B")) == (107, 0)
    assert program.cycles == 5 * (107 + 30)


def test_a_ring_is_carried_by_the_scan_and_its_copies_may_be_transposed(program):
    assert program.rings == {RING}
    assert program.copied_rings == [Array("bf16", (8, 16, 4))]


def test_sums_in_ticks_are_told_from_sums_after_them(program):
    assert program.sums_in_scan() == [Array("bf16", (4, 16)), Array("f32", ())]
    assert program.sums_after_scan() == [Array("f32", (4,))]
    assert program.integer_constants == [Array("s32", (4, 60))]
    assert (program.code_bytes, program.temporary_bytes) == (3, 4)


def test_the_folder_that_is_named_is_the_only_one_that_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("AOT_TPU", str(tmp_path))
    assert libtpu_folder() is None
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu/libtpu.so").touch()
    assert libtpu_folder() == tmp_path
