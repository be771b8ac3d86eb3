"""Compile small pipelines for TPUs that are not there, and print what the compiler made of them, as JSON.

libtpu reads its environment when it starts, and other tests need a process without it: run this in a process of its
own, `python -m support.programs_for_tpu`.
"""

import json
import sys

from chips import compile_alone, compile_pipeline, gpt, mlp, ratio_of_cycles, sums_of_gradients
from tpu_compiler import Compiled, mesh_of, use_libtpu

IPUS = 4
MICRO_BATCHES = 128


def main() -> int:
    assert use_libtpu()
    mesh = mesh_of("v5e:2x2", IPUS)
    layers = mlp(512, 256, micro_batches=MICRO_BATCHES)
    block = gpt(256, 4, sequences=2, tokens=256, micro_batches=8, vocabulary=4096)
    programs = {
        "layers": (compile_pipeline(layers, mesh), compile_alone(layers, mesh)),
        "block": (compile_pipeline(block, mesh, concurrent=True), compile_alone(block, mesh)),
    }
    found = {name: _described(pipeline, alone) for name, (pipeline, alone) in programs.items()}
    split = compile_pipeline(mlp(256, 128, layers=1, micro_batches=4), mesh, "grouped-zb")
    found["B and W apart"] = {"permutes": split.permutes}
    two_replicas = compile_pipeline(mlp(256, 128, layers=1, micro_batches=2), mesh_of("v5e:2x2", 2, replicas=2))
    print(json.dumps({**found, "sums over replicas": sums_of_gradients(two_replicas)}))
    return 0


def _described(pipeline: Compiled, alone: Compiled) -> dict[str, object]:
    return {
        "ratio": ratio_of_cycles(pipeline, alone),
        "rings": [f"{ring.dtype}{list(ring.dims)}" for ring in pipeline.rings],
        "copied rings": [f"{ring.dtype}{list(ring.dims)}" for ring in pipeline.copied_rings],
        "bodies": sorted(pipeline.bodies),
        "permutes": pipeline.permutes,
        "integer constants": [constant.dims for constant in pipeline.integer_constants],
    }


if __name__ == "__main__":
    sys.exit(main())
