"""Test what is found in a compiled pipeline's text, with a short program in the notation of the compiler for TPU."""

from types import SimpleNamespace

from ipu_jax.chips import Array, Program
from program_text import (
    copied_rings,
    integer_constants,
    kernels,
    permutes_beside_work,
    rings,
    sums_in_scans,
    sums_outside_scans,
)

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
  %y = (bf16[4], bf16[4]) collective-permute-start(%a), source_target_pairs={{0,1}}
  %while.1 = bf16[8,4,16]{2,1,0} while(%a), condition=%c, body=%heads, metadata={op_name="f/ipu_jax.F.0/while"}
  %y.1 = bf16[4] collective-permute-done(%y)
  %while.2 = bf16[8,4,16]{2,1,0} while(%a), condition=%c, body=%other, metadata={op_name="f/ipu_jax.F.1/while"}
  %sum = (bf16[4,16]{1,0}, f32[]) all-reduce(%x, %y), to_apply=%add
  %dx = (bf16[4], bf16[4]) collective-permute-start(%a), source_target_pairs={{1,0}}
  %dx.1 = bf16[4] collective-permute-done(%dx)
  ROOT %result = (s32[], bf16[8,4,16]{2,1,0}) tuple(%i, %while.2)
}

ENTRY %main (p: bf16[4,16]) -> f32[4] {
  %constant = s32[4,60]{1,0:T(4,128)} constant({...})
  %loop = (s32[], /*index=1*/bf16[8,4,16]{2,1,0}) while(%a), condition=%c, body=%tick, \
metadata={op_name="f/ipu_jax.plan.6bba.a041/while"}, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %sum.1 = f32[4]{0} all-reduce-start(%x), to_apply=%add
}
"""


def test_rings_sums_and_permutes_are_found_in_a_program():
    program = Program(SimpleNamespace(as_text=lambda: PROGRAM, memory_analysis=lambda: None))
    assert rings(program) == {Array("bf16", (8, 4, 16))}  # carried by the scan; its copies may be transposed
    assert copied_rings(program) == [Array("bf16", (8, 16, 4))]
    assert sums_in_scans(program) == [Array("bf16", (4, 16)), Array("f32", ())]
    assert sums_outside_scans(program) == [Array("f32", (4,))]
    assert integer_constants(program) == [Array("s32", (4, 60))]
    assert permutes_beside_work(program) == [True, False]  # whether the chip works before its end


FUSIONS = """HloModule jit_f

%one (p: f32[4], at: s32[]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %sum = f32[4]{0} add(%p, %p), metadata={op_name="first" source_file="a.py"}
}

%other (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %sum.2 = f32[4]{0} add(%q, %q), metadata={op_name="second"}
}

%product (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %out = f32[4]{0} multiply(%p.1, %p.1)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %a = f32[4]{0} fusion(%x), kind=kLoop, calls=%one, backend_config={"outer":"1"}
  %b = f32[4]{0} fusion(%a), kind=kLoop, calls=%other
  ROOT %c = f32[4]{0} fusion(%b), kind=kLoop, calls=%product
}
"""


def test_equal_fusions_are_one_kernel():
    assert kernels(FUSIONS) == 2
