"""Draw the pictures of the gallery: for each kind of model, one that shows what it gains from a pipeline, or needs.

    schedules   by the FLOPs of the program's stages            GPT, mixture of experts
    bytes       of weights, gradients and the optimizer         Llama, LoRA, ResNet
    a table     as `print(pipeline)` shows it, drawn as a U     U-Net
    trainings   which run here, some in half a minute           DPO, GAN, serving, MNIST

`make pictures` draws them, in a process with 8 virtual IPUs.
"""

import argparse
import contextlib
import dataclasses
import io
import re
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from docs.website import plots
from examples import balance_loss, dpo, gan, gpt, llama, lora, serve, unet
from ipu_jax import Feed, Pipeline, fit, make_train_step
from ipu_jax.core.schedules import StageCosts
from ipu_jax.core.schedules.figures import BYTES, CONCURRENT, INK, LOCAL
from ipu_jax.steps import TrainState
from mnist_example import data, model, resnet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUES, GREENS, YELLOW = LOCAL["F"], CONCURRENT["F"], LOCAL["W"]
_QUIET: Final[Any] = {"say": lambda line: None}


def gpt_on_all_ipus() -> "Figure":
    """Draw a step of the GPT: the table's stages reach over all rows."""
    given = argparse.Namespace(ipus=4, replicas=1, width=256, blocks=8, sequence=128, micro_batch=2)
    given = argparse.Namespace(**vars(given), gradient_accumulation=8, schedule="grouped", recompute="auto")
    weights = gpt.shapes(given.width, given.blocks, 32000)
    tokens = jax.ShapeDtypeStruct((given.gradient_accumulation, given.micro_batch, given.sequence), jnp.int32)
    pipeline = gpt.make_step(given, weights).model
    return _by_costs(
        pipeline, weights, {"tokens": tokens, "targets": tokens}, "All four IPUs compute the logits of a GPT"
    )


def experts_folded() -> "Figure":
    """Draw a step of the mixture of experts under DualPipeV."""
    pipeline = balance_loss.make_pipeline("dualpipev")
    return _by_costs(pipeline, *balance_loss.make_data(), "DualPipeV, and a balance loss in every stage")


def llama_on_meshes() -> "Figure":
    """Draw what a device holds of the Llama on four meshes."""
    sizes, held = llama.Sizes(), {}
    weights = jax.tree.map(lambda w: np.zeros(w.shape, w.dtype), jax.eval_shape(sizes.init, jax.random.key(0)))
    for words, ipus, tensor in (
        ("one device", 1, 1),
        ("2 IPUs", 2, 1),
        ("2 IPUs of 2 devices", 2, 2),
        ("2 IPUs of 4 devices", 2, 4),
    ):
        step = llama.make_step(sizes, 1, ipus, tensor)
        held[words] = _fullest(step.init(weights))
    first, *_, last = (sum(of.values()) for of in held.values())
    title = f"The same Llama: {first:.0f} kB on one device, and at most {last:.0f} kB on each of eight"
    return _stacked(title, "kB that the fullest device holds between updates", held, left=150.0)


def lora_beside_all() -> "Figure":
    """Draw what an IPU holds to train adapters, and to train all weights."""
    base = lora.make_base()
    adapters = {"base": jax.tree.map(jnp.bfloat16, base), "lora": lora.make_adapters(base)}
    held = {}
    for words, params, frozen in (
        ("all weights", {"base": base}, None),
        ("adapters on a frozen base", adapters, {"base": True, "lora": False}),
    ):
        one = {"tokens": lora.sequences(0, 1)["tokens"][: lora.B]}
        options: dict[str, Any] = {"schedule": "1f1b", "gradient_accumulation": lora.M, "frozen": frozen}
        step = make_train_step(Pipeline.from_function(lora.loss, params, one, ipus=2, **options), optax.adam(1e-2))
        held[words] = _fullest(step.init(params))
    all_weights, low = (sum(of.values()) for of in held.values())
    title = f"Training adapters takes {low:.0f} kB on an IPU, and training all weights {all_weights:.0f} kB"
    return _stacked(title, "kB that the fuller of two IPUs holds between updates", held, left=190.0)


def resnet_shares() -> "Figure":
    """Draw the shares of the IPUs in the work, the weights and the kept activations of ResNet-18."""
    shape = lambda kind, *dims: jax.ShapeDtypeStruct((4, 16, *dims), kind)
    batch = {"images": shape(jnp.uint8, 28, 28), "labels": shape(jnp.uint8)}
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
    pipeline = resnet.make_pipeline("resnet18", "basic", one, ipus=4, gradient_accumulation=4, schedule="1f1b")
    params, state = resnet.shapes_of("resnet18")
    report = pipeline.report(pipeline.shard_shapes(params), batch, pipeline.shard_state_shapes(state), compile=False)
    kinds = {"FLOPs": "flops", "activations at the peak": "stash_by_tick", "weights": "weights"}
    legend = dict(zip(kinds, (plots.GREEN, plots.BLUE, plots.ORANGE), strict=True))
    shares = {}
    for words, name in kinds.items():
        values = np.array([np.max(getattr(part, name)) for part in report.ipus], float)
        shares[words] = values / values.sum()

    def draw(axes: "Axes") -> None:
        for k, (values, colour) in enumerate(zip(shares.values(), legend.values(), strict=True)):
            bars = axes.bar(np.arange(4) + 0.28 * (k - 1), values, 0.26, color=colour)
            axes.bar_label(bars, [f"{value:.0%}" for value in values], padding=3, fontsize=9.5, color=INK)
        axes.set(xticks=range(4), xticklabels=[f"IPU {k}" for k in range(4)], yticks=[])

    last = {words: float(values[-1]) for words, values in shares.items()}
    title = f"The last IPU has {last['FLOPs']:.0%} of the work of ResNet-18, and {last['weights']:.0%} of its weights"
    said = "Shares of four IPUs, as the report counts them before the program is compiled"
    return plots.plotted(title, said, draw, left=20.0, right=20.0, legend=legend, below=24.0)


def unet_as_a_u() -> "Figure":
    """Draw the table of stages that the U-Net prints, as a U."""
    lines = re.findall(r"^  \d .*$", str(unet.make_pipeline()), re.MULTILINE)
    rows = [re.split(" {2,}", line.strip()) for line in lines]  # stage, IPU, work, weights, ends after, sends
    middle = len(rows) // 2
    depth = [min(k, len(rows) - 1 - k) for k in range(len(rows))]

    def draw(axes: "Axes") -> None:
        style: dict[str, Any] = {"ha": "center", "size": 10.0}
        for k, (_, ipu, work, weights, *_, sends) in enumerate(rows):
            colour = (BLUES, YELLOW, GREENS)[int(np.sign(k - middle)) + 1]
            box = {"boxstyle": "round,pad=0.5", "fc": colour, "ec": "none"}
            text = f"IPU {ipu}: {work} of the work\n{weights} of weights"
            axes.text(k, -depth[k], text, va="center", color=INK, bbox=box, **style)
            if k + 1 < len(rows):
                way = "\u2198" if k < middle else "\u2197"
                at = -max(depth[k], depth[k + 1]) + 0.5
                aside = 0.38 if k >= middle else -0.38
                axes.text(k + 0.5 + aside, at, f"{way} {sends}", va="center", color=INK, **style)
        for k in range(middle):
            arrow = {"arrowstyle": "->", "color": plots.ORANGE, "lw": 1.8}
            last = len(rows) - 1 - k
            axes.annotate("", (last - 0.52, -k), (k + 0.52, -k), arrowprops=arrow)
            axes.text(middle, 0.06 - k, f"skip {k}", va="bottom", color=plots.ORANGE, **style)
        axes.set(xlim=(-0.6, len(rows) - 0.4), ylim=(-middle - 0.4, 0.4), xticks=[], yticks=[])
        axes.spines["bottom"].set_visible(False)

    most = max(int(row[-1].split()[0]) for row in rows[:-1])
    title = f"Skips nest: up to {most} arrays pass from one IPU to the next"
    said = "Stages, and what each sends to the next for a micro-batch"
    return plots.plotted(title, said, draw, left=8.0, right=8.0, height=240.0, below=4.0)


def dpo_margins() -> "Figure":
    """Draw by how much the policy prefers the chosen sequences, before and after its training."""
    with contextlib.redirect_stdout(io.StringIO()):
        both = {"tokens": np.concatenate([*dpo.make_pairs(0).values()])}
        plain, state = lora.trained(lora.loss, {"base": lora.make_base()}, both, ipus=4)
        base = jax.tree.map(jnp.bfloat16, plain.unshard(state.params)["base"])
        params = {"base": base, "lora": lora.make_adapters(base)}
        pipeline, state = lora.trained(dpo.loss, params, dpo.make_pairs(1), updates=15, ipus=4, frozen=dpo.FROZEN)
    others = [rows.reshape(-1, lora.B, lora.LENGTH) for rows in dpo.make_pairs(2).values()]
    policy = pipeline.forward(lambda p, tokens: dpo.log_likelihood(p["base"], p["lora"], tokens), others[0][0])
    margins = {}
    for when, weights in (("before", pipeline.shard(params)), ("after", state.params)):
        chosen, rejected = (np.asarray(policy(weights, tokens)).ravel() for tokens in others)
        margins[when] = chosen - rejected

    def draw(axes: "Axes") -> None:
        edges = np.linspace(min(map(np.min, margins.values())), max(map(np.max, margins.values())), 41).tolist()
        for values, colour in zip(margins.values(), (plots.GREY, plots.BLUE), strict=True):
            axes.hist(values, edges, color=colour, alpha=0.75)
        axes.axvline(0, color=INK, lw=1)
        axes.set_xlabel("log-likelihood of the chosen sequence, less the rejected one's")

    share = float(np.mean(margins["after"] > 0))
    title = f"After 15 updates the policy prefers {share:.0%} of other pairs as it should"
    said = f"Pairs of {len(margins['after'])} that it has not seen, by the policy's margin"
    legend = {"before": plots.GREY, "after": plots.BLUE}
    return plots.plotted(title, said, draw, right=20.0, legend=legend)


def gan_points() -> "Figure":
    """Draw the points that the generator makes, before and after its training, and real ones."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    with contextlib.redirect_stdout(io.StringIO()):
        before, after = gan.trained()
    real = gan.points(2, len(after))["points"]
    modes, _ = gan.reached(after)

    def draw(axes: "Axes") -> None:
        for column, (points, colour) in enumerate(((before, plots.GREY), (after, plots.ORANGE), (real, plots.BLUE))):
            seen = points[:256][np.max(np.abs(points[:256]), axis=1) < 1.5]
            # a line of no length from each point to itself, in one path, which keeps the file small
            ends = np.repeat(np.add(seen, [3.4 * column, 0]), 2, axis=0)
            path = Path(ends, np.tile([Path.MOVETO, Path.LINETO], len(ends) // 2))
            path.should_simplify = False
            axes.add_artist(PathPatch(path, fc="none", ec=colour, lw=3.2, capstyle="round"))
        axes.set(aspect="equal", xlim=(-1.6, 8.4), ylim=(-1.6, 1.6), yticks=[])
        axes.set_xticks([0.0, 3.4, 6.8], ["the generator, untrained", "the generator, trained", "real points"])
        axes.grid(visible=False)

    title = f"The generator reaches {modes} of {gan.CENTRES} centres"
    said = "Up to 256 points each, as far as they are in the frame"
    return plots.plotted(title, said, draw, left=12.0, right=12.0, height=320.0, below=24.0)


def serving_slots() -> "Figure":
    """Draw the tokens of each slot of the cache over the decoding steps."""
    tokens = serve.sequences(0, 512)
    shapes = jax.eval_shape(serve.init, jax.random.key(0))
    one = {"tokens": tokens[:8]}
    pipeline = Pipeline.from_function(serve.loss, shapes, one, ipus=2, gradient_accumulation=4)
    step = make_train_step(pipeline, optax.adam(1e-2))
    with Feed({"tokens": tokens}, step=step, micro_batch=8) as feed:
        state = fit(step, step.init(serve.init, jax.random.key(0)), feed, updates=60, **_QUIET).state
    prompts = serve.sequences(1, serve.GROUPS + 1, serve.B)[..., : serve.PROMPT]
    lengths = np.full(prompts.shape[:2], serve.PROMPT, np.int32)
    steps = serve.LENGTH - serve.PROMPT
    with contextlib.redirect_stdout(io.StringIO()):
        served = serve.serve(step.model, state.params, prompts, lengths, steps)
    colours = (BLUES, GREENS, YELLOW, BYTES["stash"], LOCAL["B"])

    def draw(axes: "Axes") -> None:
        for group, found in enumerate(served):
            slot, first = (1, steps // 2) if group == serve.GROUPS else (group, 0)
            axes.barh(slot, len(found) - 0.1, 0.6, first - 0.45, color=colours[group])
            for at, (token, *_) in enumerate(found):
                axes.text(first + at, slot, str(token), ha="center", va="center", size=9.0, color=INK)
        axes.set_yticks(range(serve.GROUPS), [f"slot {slot}" for slot in range(serve.GROUPS)])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set(xlim=(-0.6, steps - 0.4), xticks=range(0, steps, 5), xlabel="decoding steps, after the prompts")

    title = "A new group takes slot 1 when its sequences have ended; the others go on"
    said = "The tokens of a sequence in each slot: they go on with prompts that count up by 1, 2 or 3, modulo 32"
    legend = {f"group {group}": colour for group, colour in enumerate(colours)}
    return plots.plotted(title, said, draw, left=52.0, right=12.0, legend=legend)


def mnist_modes() -> "Figure":
    """Draw the losses of the digits network with its classifier on one IPU, and on both."""
    with tempfile.TemporaryDirectory() as folder:
        digits = data.load_mnist(mirrors=[], cache_dir=folder)
    examples = {"images": digits.train_images, "labels": digits.train_labels}
    losses = {}
    for mode in ("basic", "concurrent"):
        pipeline = model.make_pipeline(mode, {n: rows[:16] for n, rows in examples.items()}, gradient_accumulation=4)
        step = make_train_step(pipeline, optax.sgd(0.05))
        with Feed(examples, step=step, micro_batch=16) as feed:
            losses[mode] = fit(step, step.init(model.init_params, 0), feed, updates=66, **_QUIET).losses
    basic, concurrent = losses.values()
    most = float(np.max(np.abs(concurrent / basic - 1)))
    assert most < 1e-4

    def draw(axes: "Axes") -> None:
        updates = np.arange(1, len(basic) + 1)
        axes.plot(updates, basic, color=plots.ORANGE, lw=5.0, alpha=0.55)
        axes.plot(updates, concurrent, color=plots.BLUE, lw=1.8)
        axes.set(xlabel="updates", xlim=(0, len(basic)))

    title = f"Classifier on one IPU or on both: {len(basic)} losses agree to within 0.01%"
    legend = {"basic: on the last IPU": plots.ORANGE, "concurrent: on all IPUs": plots.BLUE}
    said = "Loss over updates; scikit-learn's digits, SGD"
    return plots.plotted(title, said, draw, right=20.0, legend=legend)


def _by_costs(pipeline: Pipeline, weights: Any, batch: Any, message: str) -> "Figure":
    """Draw a pipeline's schedule by the FLOPs of its stages over the largest one's, under a title of our own."""
    found = pipeline.stage_costs(pipeline.shard_shapes(weights), batch)
    relative = [np.divide(getattr(found, each.name), max(found.forward)) for each in dataclasses.fields(found)[:4]]
    run = StageCosts(*relative).simulate(pipeline.schedule)
    figure = pipeline.schedule.plot(simulation=run)
    (title,) = (text for text in figure.texts if text.get_text() == figure.get_suptitle())
    title.set_text(f"{message}; IPUs are idle for {run.bubble:.0%}")
    return figure


def _fullest(state: TrainState) -> dict[str, float]:
    """Return the kB of weights and of the optimizer's state on the device that holds the most."""
    held: dict[Any, dict[str, float]] = {}
    for kind, tree in (("weights", state.params), ("optimizer", state.optimizer)):
        for leaf in jax.tree.leaves(tree):
            for shard in leaf.addressable_shards:
                of_device = held.setdefault(shard.device, dict.fromkeys(("weights", "optimizer"), 0.0))
                of_device[kind] += shard.data.nbytes / 1000
    return max(held.values(), key=lambda of_device: sum(of_device.values()))


def _stacked(title: str, said: str, held: dict[str, dict[str, float]], left: float) -> "Figure":
    """Draw a bar of weights and the optimizer's state for each way to hold them."""
    legend = {"weights": BYTES["weights"], "optimizer's state": BYTES["optimizer"]}

    def draw(axes: "Axes") -> None:
        ends = np.zeros(len(held))
        for kind, colour in zip(("weights", "optimizer"), legend.values(), strict=True):
            values = np.array([of[kind] for of in held.values()])
            axes.barh(range(len(held)), values, 0.6, ends, color=colour)
            ends += values
        for row, end in enumerate(ends):
            beside: dict[str, Any] = {"xytext": (5.0, 0.0), "textcoords": "offset points", "va": "center"}
            axes.annotate(f"{end:.0f} kB", (end, row), size=10.5, color=INK, **beside)
        axes.set_yticks(range(len(held)), held)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)

    height = 100.0 + 28.0 * len(held)
    return plots.plotted(title, said, draw, left=left, right=60.0, legend=legend, height=height, below=8.0)


GALLERY: Final[dict[str, Callable[[], "Figure"]]] = {
    "gallery-gpt.svg": gpt_on_all_ipus,
    "gallery-llama.svg": llama_on_meshes,
    "gallery-resnet.svg": resnet_shares,
    "gallery-unet.svg": unet_as_a_u,
    "gallery-experts.svg": experts_folded,
    "gallery-lora.svg": lora_beside_all,
    "gallery-dpo.svg": dpo_margins,
    "gallery-gan.svg": gan_points,
    "gallery-serving.svg": serving_slots,
    "gallery-mnist.svg": mnist_modes,
}

TRAINED: Final = frozenset({"gallery-dpo.svg", "gallery-gan.svg", "gallery-mnist.svg"})
"""Pictures whose places rounding errors move."""

BY_FLOPS: Final = frozenset({"gallery-gpt.svg", "gallery-experts.svg"})
"""Schedules whose tasks are as wide as their FLOPs."""
