"""Compile pipelines for TPUs and GPUs that are not there, and compare a stage with the same layers alone.

XLA's compiler for TPU runs on any machine, and nothing here runs on a TPU. Cycles are the compiler's own estimates for
one chip. They don't count collectives, writes to flat buffers and waiting for other chips, so only ratios of them mean
something. Memory, code and instructions are what the compiled program has.

    mlp:grouped          2 layers of 1024 x 2048 on each of 4 IPUs, M=8
    mlp:1f1b             the same under "1f1b"
    mlp:1f1b:both        the same with a concurrent embedding and head
    gpt:grouped:both     a transformer block of 1024 on each of 4 IPUs, M=16, with a concurrent embedding and head
    gpt512, gpt2048      one of 512 with 8 heads and 512 tokens, and one of 2048 with 16 heads of 128 features, M=4
    gptflash:grouped:both  of 1024 with 8 heads and Pallas's flash attention, whose cycles the compiler does not count
    tables               tiny layers on 16 and on 256 IPUs, M=512: do tables of micro-batches make the program large?
    replicas             2 replicas of 2 IPUs with bfloat16 weights: in which dtype are gradients summed?
    h100                 small layers, also in a scan, on 4 H100s: how many predicates does the host read in a tick?

`make aot` installs the compilers beside the environment. If they were inside, jax would look for a TPU and for a GPU in
every process.

    python benchmarks/chips.py [--check] [--only mlp:grouped ...] [--topology v5e:2x2]
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from figures import Figures
from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.chips import ChipReport, Program, compile_ahead, describe
from program_text import copied_rings, permutes_beside_work, sums_in_scans, sums_outside_scans
from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection

IPUS = 4
WEIGHT = jnp.bfloat16
TPUS = "v5e:2x2"
H100S = f"h100x{IPUS}"


@dataclasses.dataclass(frozen=True)
class Model:
    """The part of a model that each IPU has.

    Attributes:
        block: takes weights and activations, and returns activations of the same shape.
        weights: the shapes of its weights.
        x: the shape of a micro-batch's activations: (..., width), bfloat16.
        micro_batches: how many there are in a step.
        vocabulary: rows of the table that concurrent stages share.
    """

    block: Callable[[Any, Any], Any]
    weights: Any
    x: tuple[int, ...]
    micro_batches: int
    vocabulary: int = 4096

    @property
    def width(self) -> int:
        return self.x[-1]


# models


def mlp(width: int = 1024, rows: int = 512, *, layers: int = 2, micro_batches: int = 8, scan: bool = False) -> Model:
    """Return residual layers with a hidden layer of twice their width, in a scan or one after the other."""
    shapes = {"up": (width, 2 * width), "down": (2 * width, width), "gain": (width,)}
    if scan:
        stacked = {name: _weight(layers, *shape) for name, shape in shapes.items()}
        return Model(_mlp_scan, stacked, (rows, width), micro_batches)
    layer = {name: _weight(*shape) for name, shape in shapes.items()}
    return Model(_mlp_block, [layer] * layers, (rows, width), micro_batches)


def _mlp_block(weights: Any, x: Any) -> Any:
    return functools.reduce(_mlp_layer, weights, x)


def _mlp_scan(weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (_mlp_layer(x, w), None), x, weights)[0]


def _mlp_layer(x: Any, w: Any) -> Any:
    return x + (jax.nn.gelu(x @ w["up"]) @ w["down"]) * w["gain"]


def gpt(
    width: int = 1024,
    heads: int = 16,
    *,
    sequences: int = 4,
    tokens: int = 1024,
    micro_batches: int = 16,
    vocabulary: int = 32000,
    flash: bool = False,
) -> Model:
    """Return a transformer block with causal attention, in jax.numpy or by Pallas's flash attention."""
    weights = {
        "qkv": _weight(width, 3, heads, width // heads),
        "out": _weight(heads, width // heads, width),
        "up": _weight(width, 4 * width),
        "down": _weight(4 * width, width),
        "before attention": _weight(width),
        "before layers": _weight(width),
    }
    block = functools.partial(_gpt_block, attention=_flash_attention if flash else _attention)
    return Model(block, weights, (sequences, tokens, width), micro_batches, vocabulary)


# B sequences, T and S tokens, D features, N heads, K features of a head
def _gpt_block(w: Any, x_BTD: Any, *, attention: Callable[..., Any]) -> Any:
    q_BTNK, k_BSNK, v_BSNK = jnp.einsum("btd,dcnk->cbtnk", _normed(x_BTD, w["before attention"]), w["qkv"])
    x_BTD = x_BTD + jnp.einsum("btnk,nkd->btd", attention(q_BTNK, k_BSNK, v_BSNK), w["out"])
    return x_BTD + jax.nn.gelu(_normed(x_BTD, w["before layers"]) @ w["up"]) @ w["down"]


def _attention(q_BTNK: Any, k_BSNK: Any, v_BSNK: Any) -> Any:
    tokens, features = q_BTNK.shape[1], q_BTNK.shape[-1]
    scores_BNTS = jnp.einsum("btnk,bsnk->bnts", q_BTNK, k_BSNK, preferred_element_type=jnp.float32) / features**0.5
    scores_BNTS = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores_BNTS, -1e30)
    return jnp.einsum("bnts,bsnk->btnk", jax.nn.softmax(scores_BNTS).astype(q_BTNK.dtype), v_BSNK)


def _flash_attention(*q_k_v: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    q_BNTK, k_BNSK, v_BNSK = (heads.swapaxes(1, 2) for heads in q_k_v)
    return flash_attention(q_BNTK, k_BNSK, v_BNSK, causal=True).swapaxes(1, 2)


def _normed(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def _weight(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, WEIGHT)


# programs


def make_pipeline(
    model: Model,
    mesh: Mesh,
    schedule: str = "grouped",
    *,
    concurrent: bool = False,
    places: Sequence[int] | None = None,
) -> tuple[Pipeline, Any, Any]:
    """Return a pipeline of blocks, and the shapes of its weights and of its batch.

    Args:
        places: the IPU of each block; by default there is one on each IPU of the mesh.
        concurrent: whether an embedding and a head, which share a table, run on all IPUs. Without them, the loss is the
            mean square of the last block's result.
    """
    places = range(mesh.shape["ipu"]) if places is None else places
    weights = {f"block{i}": model.weights for i in range(len(places))}
    blocks = [Stage(_stage_of(model), params=f"block{i}", ipu=ipu) for i, ipu in enumerate(places)]
    if concurrent:
        weights["table"] = _weight(model.vocabulary, model.width)
        stages = [*_around(blocks, model.vocabulary)]
    else:
        stages = [*blocks, Stage(_mean_square, ipu=places[-1])]
    specs = {"table": PartitionSpec("ipu")} if concurrent else {}
    pipeline = Pipeline(stages, mesh=mesh, schedule=schedule, gradient_accumulation=model.micro_batches, specs=specs)
    return pipeline, weights, _batch_of(model, pipeline.replicas, concurrent=concurrent)


def compile_pipeline(model: Model, mesh: Mesh, schedule: str = "grouped", *, concurrent: bool = False) -> Program:
    """Return the compiled loss and gradients of `make_pipeline`."""
    return program_of(compile_ahead(*make_pipeline(model, mesh, schedule, concurrent=concurrent)))


def program_of(report: ChipReport) -> Program:
    """Return the program of a report."""
    assert report.program is not None, f"too large to be compiled: {report.memory}"
    return report.program


def compile_alone(model: Model, mesh: Mesh) -> Program:
    """Return the compiled forward and backward pass of one block, on the first chip of a mesh."""
    whole = NamedSharding(Mesh(mesh.devices[:1, :1], mesh.axis_names), PartitionSpec())
    x = jax.ShapeDtypeStruct(model.x, WEIGHT)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), (model.weights, x, x)
    )
    step = jax.jit(lambda weights, x, dy: jax.vjp(model.block, weights, x)[1](dy))
    return Program(step.lower(*arguments).compile())


def ratio_of_cycles(pipeline: Program, alone: Program) -> float:
    """Return the cycles of F, B and W, each on the IPU where it takes the most, divided by the block's alone."""
    return sum(pipeline.cycles_of(task) for task in "FBW") / alone.cycles


def sums_of_gradients(pipeline: Program) -> list[str]:
    """Return the dtype of each gradient's sum over replicas."""
    return [array.dtype for array in sums_outside_scans(pipeline) if array.dims]  # the loss has no dims


def _stage_of(model: Model) -> Callable[[Any, Any, Any], Any]:
    return lambda weights, x, microbatch: model.block(weights, microbatch["x"] if x is None else x)


def _mean_square(_: None, x: Any, microbatch: Any) -> Any:
    return jnp.mean(x.astype(jnp.float32) ** 2)


def _around(blocks: list[Stage], vocabulary: int) -> list[Stage]:
    """Return the blocks between an embedding and a head on all IPUs."""

    def embed(table: Any, _: None, microbatch: Any) -> Any:
        return embedding(table, microbatch["tokens"], size=vocabulary)

    def loss(table: Any, x: Any, microbatch: Any) -> Any:
        logits = tied_projection(x, table, size=vocabulary)
        return jnp.mean(log_softmax_cross_entropy(logits, microbatch["labels"], size=vocabulary))

    return [
        Stage(embed, params="table", ipu=ALL_IPUS, name="embed"),
        *blocks,
        Stage(loss, params="table", ipu=ALL_IPUS, name="loss"),
    ]


def _batch_of(model: Model, replicas: int, *, concurrent: bool) -> dict[str, jax.ShapeDtypeStruct]:
    leading = (replicas, model.micro_batches) if replicas > 1 else (model.micro_batches,)
    leaf = lambda shape, dtype: jax.ShapeDtypeStruct((*leading, *shape), dtype)
    if concurrent:
        return {key: leaf(model.x[:-1], jnp.int32) for key in ("tokens", "labels")}
    return {"x": leaf(model.x, WEIGHT)}


# figures


def mlp_grouped(figures: Figures, name: str, topology: str) -> None:
    model, mesh = mlp(), make_mesh(1, IPUS, devices=describe(topology))
    pipeline = compile_pipeline(model, mesh)
    _stage_figures(figures, name, pipeline, compile_alone(model, mesh), at_most=1.03)
    _messages_travel_beside_tasks(figures, name, pipeline)


def mlp_1f1b(figures: Figures, name: str, topology: str) -> None:
    model, mesh = mlp(), make_mesh(1, IPUS, devices=describe(topology))
    _stage_figures(figures, name, compile_pipeline(model, mesh, "1f1b"), compile_alone(model, mesh), at_most=1.02)


def mlp_1f1b_both(figures: Figures, name: str, topology: str) -> None:
    model, mesh = mlp(), make_mesh(1, IPUS, devices=describe(topology))
    pipeline = compile_pipeline(model, mesh, "1f1b", concurrent=True)
    _stage_figures(figures, name, pipeline, compile_alone(model, mesh), at_most=1.12)
    _blocks_are_one_class(figures, name, pipeline, megabytes=8.5)
    # each is needed: the embedding's result, x to the head, the parts of the head's dx, and dx to the embedding
    messages = [array for array in sums_in_scans(pipeline) if array.dims == model.x]
    figures.add(f"all-reduces of the message for each micro-batch, {name}", len(messages), 4, at_least=4)


def gpt_grouped_both(figures: Figures, name: str, topology: str) -> None:
    model, mesh = gpt(), make_mesh(1, IPUS, devices=describe(topology))
    pipeline = compile_pipeline(model, mesh, concurrent=True)
    _stage_figures(figures, name, pipeline, compile_alone(model, mesh), at_most=1.05)
    _blocks_are_one_class(figures, name, pipeline, megabytes=17)
    _messages_travel_beside_tasks(figures, name, pipeline)
    figures.add(f"temporary MB of a chip, {name}", pipeline.temporary_bytes / 1e6, 1700)


def gpt_512(figures: Figures, name: str, topology: str) -> None:
    # it is 1.53 if a softmax's max is kept
    _gpt_figures(figures, name, topology, gpt(512, 8, tokens=512, micro_batches=IPUS, vocabulary=512), at_most=1.35)


def gpt_2048(figures: Figures, name: str, topology: str) -> None:
    # it is 1.38 if the exp of scores is kept, 268 MB
    _gpt_figures(figures, name, topology, gpt(2048, 16, micro_batches=IPUS, vocabulary=512), at_most=1.20)


def _gpt_figures(figures: Figures, name: str, topology: str, model: Model, *, at_most: float) -> None:
    mesh = make_mesh(1, IPUS, devices=describe(topology))
    pipeline = compile_pipeline(model, mesh, concurrent=True)
    _stage_figures(figures, name, pipeline, compile_alone(model, mesh), at_most=at_most)


def gptflash_grouped_both(figures: Figures, name: str, topology: str) -> None:
    pipeline = compile_pipeline(
        gpt(heads=8, flash=True), make_mesh(1, IPUS, devices=describe(topology)), concurrent=True
    )
    _blocks_are_one_class(figures, name, pipeline, megabytes=17)
    _messages_travel_beside_tasks(figures, name, pipeline)


def tables(figures: Figures, name: str, topology: str) -> None:
    model = mlp(128, 8, layers=1, micro_batches=512)
    megabytes = {
        ipus: compile_pipeline(model, make_mesh(1, ipus, devices=describe(shape)), "1f1b").code_bytes / 1e6
        for ipus, shape in ((16, "v5e:4x4"), (256, "v5e:16x16"))
    }
    figures.add("code MB of a chip, M=512, 256 IPUs", megabytes[256], 1.3)
    # it is 0.32 with M=64, too: not the tables. The two permutes go between neighbours that are one hop apart; in the
    # order of the chips' numbers they take 0.6 more
    figures.add("code MB of a chip, M=512, 256 IPUs - 16 IPUs", megabytes[256] - megabytes[16], 0.4)


def replicas(figures: Figures, name: str, topology: str) -> None:
    pipeline = compile_pipeline(mlp(256, 256), make_mesh(2, 2, devices=describe(topology)))
    dtypes = sums_of_gradients(pipeline)
    figures.add("sums of bfloat16 gradients over 2 replicas", len(dtypes), at_least=6)
    narrow = sum(dtype != "f32" for dtype in dtypes)
    figures.add("sums of bfloat16 gradients over 2 replicas, not in float32", narrow, 0)


def _stage_figures(figures: Figures, name: str, pipeline: Program, alone: Program, *, at_most: float) -> None:
    figures.add(f"cycles of F+B+W / the same layers alone, {name}", ratio_of_cycles(pipeline, alone), at_most)
    figures.add(f"copies of a whole ring in a tick, {name}", len(copied_rings(pipeline)), 0)


def _blocks_are_one_class(figures: Figures, name: str, pipeline: Program, *, megabytes: float) -> None:
    # F and B of the embedding and of the blocks, and the head
    figures.add(f"bodies of F, B and W, {name}", len(pipeline.bodies), 5)
    figures.add(f"code MB of a chip, {name}", pipeline.code_bytes / 1e6, megabytes)


def _messages_travel_beside_tasks(figures: Figures, name: str, pipeline: Program) -> None:
    figures.add(f"permutes beside work, {name}", sum(permutes_beside_work(pipeline)), at_least=2)


def h100(figures: Figures, name: str, topology: str) -> None:
    if not is_installed(H100S):
        figures.leave_out("programs for GPU", "XLA's compiler for NVIDIA GPUs: make aot")
        return
    mesh = make_mesh(1, IPUS, devices=describe(H100S))
    layers = {"": mlp(256, 128, layers=1), ", scan": mlp(256, 128, layers=4, scan=True)}
    # under the one-phase clock concurrent stages run in some ticks of each stretch, and their 3 guards have collectives
    cases = [("grouped", "concurrent", "", 0), ("1f1b", "concurrent", "", 3)]
    cases += [(schedule, "basic", form, 0) for schedule in ("grouped", "1f1b", "zb-h1") for form in layers]
    for schedule, mode, form, most in cases:
        report = compile_ahead(*make_pipeline(layers[form], mesh, schedule, concurrent=mode == "concurrent"))
        assert report.host_loops is not None
        label = f"loops whose predicate the host reads in a tick, {name}:{schedule}, {mode}{form}"
        figures.add(label, report.host_loops, most)


PROGRAMS = {
    "mlp:grouped": mlp_grouped,
    "mlp:1f1b": mlp_1f1b,
    "mlp:1f1b:both": mlp_1f1b_both,
    "gpt:grouped:both": gpt_grouped_both,
    "gpt512": gpt_512,
    "gpt2048": gpt_2048,
    "gptflash:grouped:both": gptflash_grouped_both,
    "tables": tables,
    "replicas": replicas,
    "h100": h100,
}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--topology", default=TPUS, help="the chips of all programs but tables (default: %(default)s)")


def is_installed(topology: str) -> bool:
    """Return whether the compiler for the chips of this topology is installed."""
    try:
        describe(topology)
    except ValueError:
        return False
    return True


def main() -> int:
    figures = Figures("what XLA's compilers make of pipelines; no chip is needed", flags=flags)
    jax.config.update("jax_platforms", "cpu")
    if not is_installed(TPUS):
        figures.leave_out("programs for TPU", "XLA's compiler for TPU: make aot")
        # a run of all scripts goes on without these figures
        return 0 if figures.args.record else 2
    try:
        make_mesh(1, IPUS, devices=describe(figures.args.topology))
    except ValueError as error:
        print(f"chips.py: --topology: {error}", file=sys.stderr)
        return 2
    for name, measure in PROGRAMS.items():
        if name in (figures.args.only or PROGRAMS):
            measure(figures, name, figures.args.topology)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())
