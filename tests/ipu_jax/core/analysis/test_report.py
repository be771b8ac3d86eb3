"""Test a pipeline's report against hand counts, the arrays themselves and the compiled program; and its warning."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, make_schedule
from ipu_jax.core.analysis.report import make_report
from ipu_jax.core.programs.cost import in_units
from ipu_jax.core.schedules.figures import BYTES, IDLE
from sharded_ops import log_softmax_cross_entropy, matmul
from support.dense import chain
from support.platforms import programs_for
from support.refusals import refused

ROWS, MICRO_BATCHES = 4, 6
WIDTHS = (8, 16, 32)


def two_stages(**options):
    def layer(w, x, mb):
        return mb @ w

    def last(w, x, mb):
        return jnp.sum(x @ w)

    stages = [Stage(layer, params="first", ipu=0), Stage(last, params="last", ipu=1)]
    return Pipeline(stages, gradient_accumulation=MICRO_BATCHES, **options)


def arguments(pipeline):
    params = {"first": jnp.ones(WIDTHS[:2]), "last": jnp.ones(WIDTHS[1:])}
    return pipeline.shard(params), jax.ShapeDtypeStruct((MICRO_BATCHES, ROWS, WIDTHS[0]), "float32")


def concurrent_head(size=10, ipus=4, **options):
    def body(w, x, mb):
        return jax.nn.relu(mb["x"] @ w)

    def head(w, x, mb):
        return jnp.mean(log_softmax_cross_entropy(matmul(x, w), mb["y"], size=size))

    stages = [Stage(body, params="body", ipu=0), Stage(head, params="head", ipu=ALL_IPUS)]
    specs = {"head": PartitionSpec(None, "ipu")}
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), gradient_accumulation=2, specs=specs, **options)
    params = pipeline.shard({"body": jnp.ones((8, 16)), "head": jnp.ones((16, size))})
    return pipeline, params, {"x": jnp.ones((2, ROWS, 8)), "y": jnp.zeros((2, ROWS), jnp.int32)}


@pytest.mark.parametrize(("platform", "flops"), [("tpu", 4000), ("gpu", 2000), ("cpu", 0)])
@pytest.mark.parametrize("schedule", ["1f1b", "grouped"])
def test_on_chips_a_report_says_what_messages_cost(schedule, platform, flops):
    rows, (a, b, c) = ROWS, WIDTHS
    first, second = 2 * rows * a * b, 2 * rows * b * c  # of a product; the batch needs no gradient
    message = flops * 4 * rows * b  # in FLOPs
    f, back = second + rows * c, 2 * second
    with programs_for(platform):
        pipeline = two_stages(schedule=schedule)
        found = pipeline.report(*arguments(pipeline), compile=False)
    if schedule == "1f1b":
        # IPU 0  0F0 > | 0F1 > |       | 0B0 0F2 > | 0B1 0F3 > | ... | 0B5
        # IPU 1        | 1F0   | 1B0 > | 1F1 1B1 > | 1F2 1B2 > | ... |
        work, exposed = first + f + back + 5 * (f + back) + first, 8 * message
        expected = f"messages: 8 ticks send, .* under the one-phase clock: {exposed / (work + exposed):.1%} of the step"
    else:
        work, exposed = None, 0
        expected = "messages: they travel beside tasks, under the two-phase clock"
    assert [part.flops for part in found.ipus] == [6 * 2 * first, 6 * (f + back)]
    if platform == "cpu":
        assert (found.exposed, str(found).count("messages:")) == (None, 0)
    else:
        assert found.exposed == pytest.approx(exposed / (work + exposed) if work else 0)
        assert re.search(expected, str(found).splitlines()[-1])
    if work:
        assert found.exchanges == 8
        assert [part.idle for part in found.ipus] == pytest.approx(
            [1 - part.flops / (work + exposed) for part in found.ipus]
        )


def test_on_chips_a_schedule_that_grouped_beats_warns_when_a_pipeline_is_made():
    layers = [Stage(lambda w, x, mb: (mb if x is None else x) @ w, params=f"layer {k}", ipu=k) for k in range(4)]
    stages = [*layers, Stage(lambda _, x, mb: jnp.mean(x), name="loss", ipu=3)]

    def made(schedule, **options):
        return Pipeline(stages, schedule=schedule, gradient_accumulation=8, **options)

    with programs_for("tpu"):
        with pytest.warns(UserWarning, match="on tpu") as caught:
            pipeline = made("1f1b")
        (warning,) = caught
        text = str(warning.message)
        for part in ("'1f1b' on tpu", "40.0% of a step", "'grouped'", "27.3%", "7 instead of 4 micro-batches", "IPU 0"):
            assert part in text
        with pytest.warns(UserWarning, match="'own' on tpu"):
            made(dataclasses.replace(pipeline.schedule, name="own"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.replace()
            for schedule in ("grouped", "sequential", "zb-h1", "auto"):
                made(schedule)
    made("1f1b")  # on a CPU: warnings are errors in tests


def test_an_ipu_may_hold_nothing_but_padding():
    pipeline, params, batch = concurrent_head(size=5)
    found = pipeline.report(params, batch, compile=False)
    column = 4 * 16
    assert [part.weights for part in found.ipus] == [512 + 2 * column, 2 * column, column, 0]
    assert [part.weights + part.padding for part in found.ipus] == [512 + 2 * column] * 4


def one_forward_one_backward(ipus, dtype, **options):
    """A pipeline of products, one per IPU, of these widths, with the bytes of a micro-batch's x on each IPU."""
    widths = [8, 32, 16, 24, 8][: ipus + 1]

    def layer(w, x, mb):
        return (mb if x is None else x) @ w

    def last(w, x, mb):
        return jnp.sum(x @ w)

    stages = [Stage(last if k == ipus - 1 else layer, params=f"{k}", ipu=k) for k in range(ipus)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), schedule="1f1b", gradient_accumulation=MICRO_BATCHES)
    params = pipeline.shard({f"{k}": jnp.ones(widths[k : k + 2], dtype) for k in range(ipus)})
    report = pipeline.report(params, jax.ShapeDtypeStruct((MICRO_BATCHES, ROWS, 8), dtype), compile=False, **options)
    # the first stage reads the batch, and keeps nothing
    return report, [jnp.dtype(dtype).itemsize * ROWS * width * (k > 0) for k, width in enumerate(widths[:-1])]


@pytest.mark.parametrize(("ipus", "dtype"), [(2, "float32"), (4, "float32"), (4, "bfloat16")])
def test_bytes_over_the_ticks_are_those_of_the_micro_batches_between_f_and_b(ipus, dtype):
    report, sizes = one_forward_one_backward(ipus, dtype)
    if ipus == 2:
        # IPU 0  0F0 | 0F1 |     | 0B0 | 0F2 | 0B1 | ...
        # IPU 1      | 1F0 | 1B0 | 1F1 | 1B1 | 1F2 | ... | 1B5 |
        assert report.ipus[1].stash_by_tick == (0, *[sizes[1]] * 2 * MICRO_BATCHES, 0)
    else:
        # IPU 1      | 1F0 | 1F1 | 1F2 |     |     | 1B0 | ...: at most 3 = 4 IPUs - IPU 1
        assert report.ipus[1].stash_by_tick[:8] == tuple(sizes[1] * held for held in (0, 1, 2, 3, 3, 3, 3, 3))
    for ipu, size in enumerate(sizes):
        assert max(report.ipus[ipu].stash_by_tick) == report.ipus[ipu].stash == size * min(MICRO_BATCHES, ipus - ipu)
        by_tick, kinds = report.bytes_by_tick(ipu), report.bytes_by_kind(ipu)
        assert by_tick.pop("stash") == [*report.ipus[ipu].stash_by_tick]
        padding = ["padding"] if report.ipus[ipu].padding else []
        assert [*by_tick] == ["weights", *padding, "gradients", "batch", "other temporary"]
        kinds["other temporary"] = kinds.pop("temporary") - report.stash
        assert {kind: {*sizes} for kind, sizes in by_tick.items()} == {kind: {size} for kind, size in kinds.items()}
        peak = report.at_peak(ipu)
        kept = [one for one in peak.alive if one.micro_batches]
        # the first stage keeps nothing, and any other its x, of the first micro-batches that are between F and B
        first = ipus - 1 - ipu if ipus > 2 else 0
        assert (peak.tick, [one.micro_batches for one in kept]) == (
            (0, []) if ipu == 0 else (ipus - 1 if ipus > 2 else 1, [(*range(first + 1),)])
        )
        assert all(one.nbytes == size * len(one.micro_batches) for one in kept)
        assert peak.nbytes == max(map(sum, zip(*report.bytes_by_tick(ipu).values(), strict=True)))


def test_with_w_an_ipu_holds_x_from_f_to_w_and_dy_from_b_to_w():
    pipeline = two_stages(schedule="zb-h1")
    report = pipeline.report(*arguments(pipeline), compile=False)
    first, last = report.ipus
    of = pipeline.schedule
    assert of.weight is not None

    def held(begins, ends):
        return np.array([sum(b <= t <= e for b, e in zip(begins, ends, strict=True)) for t in range(of.ticks)])

    message = 4 * ROWS * 16
    assert first.stash_by_tick == (*(message * held(of.backward[0], of.weight[0])),), "it reads the batch again in W"
    of_last = message * held(of.forward[1], of.weight[1]) + 4 * held(of.backward[1], of.weight[1])  # dy of a sum
    assert last.stash_by_tick == (*of_last,)
    assert (max(first.stash_by_tick), max(last.stash_by_tick)) == (first.stash, last.stash)
    peak = report.at_peak(1)
    kept = {one.what.split(", ")[1]: (one.micro_batches, one.values) for one in peak.alive if one.micro_batches}
    holding = lambda b, e: tuple(k for k, (x, y) in enumerate(zip(b, e, strict=True)) if x <= peak.tick <= y)
    assert kept == {
        "until W": (holding(of.forward[1], of.weight[1]), f"its input float32[{ROWS},16]"),
        "from B to W": (holding(of.backward[1], of.weight[1]), "its input float32[]"),
    }
    assert last.stash == sum(one.nbytes for one in peak.alive if one.micro_batches)


@pytest.mark.parametrize("name", ["looped", "looped-bfs", "looped-zb", "zbv", "dualpipev"])
def test_what_lives_at_the_peak_adds_up_where_messages_wait_in_queues(name):
    """A task that reads a message from its queue stashes in the same moment: there both are alive."""
    schedule = make_schedule(name, ipus=4, gradient_accumulation=8)
    last = len(schedule.placement) - 1

    def stage(k, ipu):
        run = lambda w, x, mb: jnp.exp((mb if x is None else x) @ w)
        return Stage((lambda w, x, mb: jnp.sum(x @ w)) if k == last else run, params=f"{k}", ipu=ipu)

    stages = [stage(k, ipu) for k, ipu in enumerate(schedule.placement)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 4), schedule=name, gradient_accumulation=8)
    weights = {f"{k}": np.ones((4, 4), np.float32) for k in range(last + 1)}
    report = pipeline.report(pipeline.shard_shapes(weights), np.ones((8, 2, 4), np.float32), compile=False)
    peaks = [report.at_peak(ipu) for ipu in range(4)]
    for peak in peaks:
        assert peak.nbytes == max(map(sum, zip(*report.bytes_by_tick(peak.ipu).values(), strict=True)))
    assert any("x, until F" in one.what or "dy, until B" in one.what for peak in peaks for one in peak.alive)


def test_the_stash_of_a_stage_on_all_ipus_is_in_use_on_each():
    def layer(w, x, mb):
        return (mb if x is None else x) @ w

    stages = [Stage(layer, params=f"{k}", ipu=ipu) for k, ipu in enumerate((0, ALL_IPUS))]
    stages.append(Stage(lambda w, x, mb: jnp.sum(x @ w), params="2", ipu=1))
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), specs={"1": PartitionSpec()}, gradient_accumulation=MICRO_BATCHES)
    params = pipeline.shard({f"{k}": jnp.ones(shape) for k, shape in enumerate([(8, 16), (16, 32), (32, 4)])})
    report = pipeline.report(params, jax.ShapeDtypeStruct((MICRO_BATCHES, ROWS, 8), "float32"), compile=False)
    # IPU 0  0F0 | 1F0 0F1 1B0 | ... | 0B5      all IPUs keep x of stage 1, and IPU 1 also x of stage 2,
    # IPU 1      | 1F0 2F0 2B0 1B0 | ... |      from F to B, in one tick
    kept = [(4 * ROWS * 16,), (4 * ROWS * 16, 4 * ROWS * 32)]
    assert [part.stash_by_tick for part in report.ipus] == [(0, *[sum(of)] * MICRO_BATCHES, 0) for of in kept]


def test_a_picture_of_bytes_shows_them_with_the_limit():
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex
    from matplotlib.patches import PathPatch

    report, _ = one_forward_one_backward(4, "float32", ipu_memory=18e3)
    figure = report.plot()
    for ipu, axes in enumerate(figure.axes):
        areas = {}
        for patch in axes.findobj(PathPatch):
            (x, y), colour = np.array(patch.get_path().vertices)[:-1].T, to_hex(patch.get_facecolor())
            areas[colour] = abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2
        shown = {kind: sum(sizes) for kind, sizes in report.bytes_by_tick(ipu).items() if any(sizes)}
        assert {kind: areas.pop(colour) for kind, colour in BYTES.items() if colour in areas} == shown
        whole = len(report.ipus[0].stash_by_tick) * report.total(ipu)
        assert areas == {IDLE: whole - sum(shown.values())}
        most = max(map(sum, zip(*report.bytes_by_tick(ipu).values(), strict=True)))
        words = [text.get_text() for text in axes.texts]
        assert words == [f"IPU {ipu}", f"{in_units(most, 'B')} in use at most, of {in_units(report.total(ipu), 'B')}"]
        assert [np.array(line.get_ydata())[0] for line in axes.lines] == [most, 18e3]
    assert "An IPU can hold 18.0 kB (dashed)." in "".join(text.get_text() for text in figure.texts)
    far = dataclasses.replace(report, limit=80e9).to_svg()
    assert "An IPU can hold 80.0 GB." in far
    assert far == dataclasses.replace(report, limit=80e9).to_svg()


def test_of_several_replicas_an_ipu_holds_the_batch_of_its_own():
    pipeline = two_stages(mesh=make_mesh(2, 2))
    params, of_one = arguments(pipeline)
    batch = jax.ShapeDtypeStruct((2, *of_one.shape), of_one.dtype)
    found = pipeline.report(params, batch, compile=False)
    assert [part.batch for part in found.ipus] == [4 * MICRO_BATCHES * ROWS * 8] * 2


def test_a_first_stage_that_reads_the_batch_needs_no_gradient_of_it():
    pipeline = two_stages(schedule="1f1b")
    first, last = pipeline.report(*arguments(pipeline), compile=False).ipus
    products = [2 * ROWS * 8 * 16, 2 * ROWS * 16 * 32]
    assert (first.flops, last.flops) == (MICRO_BATCHES * 2 * products[0], MICRO_BATCHES * (3 * products[1] + ROWS * 32))
    assert (first.stash, last.stash) == (0, 4 * ROWS * 16), (
        "the first stage reads the batch, the last stashes its input"
    )
    assert first.working_set == 4 * (ROWS * 8 + 8 * 16), "its slice of the batch, copied for the product with dy"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_arguments_and_results_are_as_the_compiled_step_says(replicas):
    model = chain((None, 0, 1, None), 4, replicas=replicas, tied=True)
    pipeline = model.pipeline(2)
    params = pipeline.shard(model.params)
    found = pipeline.report(params, model.batch)
    step = jax.jit(pipeline.value_and_grad).lower(params, model.batch).compile().memory_analysis()
    assert step is not None
    part = found.ipus[0]
    assert step.argument_size_in_bytes <= part.weights + part.padding + part.batch
    assert step.output_size_in_bytes == pytest.approx(part.gradients, abs=200)
    assert found.temporary is not None


def test_shapes_serve_as_well_as_arrays():
    pipeline, params, batch = concurrent_head()
    shapes = jax.eval_shape(lambda *tree: tree, params, batch)
    assert pipeline.report(*shapes) == pipeline.report(params, batch)


def test_a_folded_schedule_has_a_report():
    model = chain((0, 1, 1, 0), 3)
    pipeline = model.pipeline(2, schedule="zbv")
    found = pipeline.report(pipeline.shard(model.params), model.batch, compile=False)
    assert all(part.flops > 0 and 0 <= part.idle < 1 for part in found.ipus)


def test_it_prints_a_row_an_ipu():
    pipeline = two_stages()
    lines = str(pipeline.report(*arguments(pipeline), compile=False)).splitlines()
    assert lines[0] == "grouped: 6 micro-batches on 2 IPUs, per step"
    assert lines[1].split()[:4] == ["IPU", "weights", "padding", "batch"]
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[4].startswith("temporary (predicted): the same on every IPU; predicted")
    assert len({len(line) for line in lines[1:4]}) == 1, "columns stand under their heads"


@pytest.mark.parametrize("ipu", [-1, 2, "0"])
def test_an_ipu_that_is_not_there_is_refused(ipu):
    pipeline = two_stages()
    found = pipeline.report(*arguments(pipeline), compile=False)
    with refused(f"ipu={ipu!r}", "give an int from 0 to 1"):
        found.bytes_by_tick(ipu)


LIMIT = 1000


def test_it_warns_of_what_does_not_fit_and_how_to_mend_it():
    pipeline = two_stages()
    with pytest.warns(UserWarning, match="more than ipu_memory=1.0 kB") as caught:
        found = pipeline.report(*arguments(pipeline), compile=False, ipu_memory=LIMIT)
    text = str(caught[0].message)
    kinds = found.bytes_by_kind(0)
    assert len(caught) == 1
    assert f"IPU 0 needs {in_units(found.total(0), 'B')}" in text
    assert all(f"{kind} {in_units(size, 'B')}" in text for kind, size in kinds.items())
    assert "(2 of 2 IPUs do not fit)" in text
    assert "recompute='all'" in text
    assert "more IPUs" in text
    assert "a smaller micro-batch" in text


def test_what_fits_is_not_warned_of():
    pipeline = two_stages()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipeline.report(*arguments(pipeline), compile=False, ipu_memory=900e6)
        given = arguments(pipeline)
        most = max(map(found.total, (0, 1)))
        make_report(pipeline.placement.plan(*given), given[1], mesh=pipeline.mesh, ipu_memory=most)


def test_a_pipeline_warns_once_for_given_shapes_and_before_it_runs(monkeypatch):
    pipeline = two_stages(ipu_memory=LIMIT)
    params, shapes = arguments(pipeline)
    batch = np.ones(shapes.shape, np.float32)
    ran = []
    programs = pipeline._programs
    step = programs.value_and_grad
    monkeypatch.setattr(programs, "value_and_grad", lambda *args: ran.append(1) or step(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="IPU 0 needs"):
            pipeline.value_and_grad(params, batch)
        assert not ran
        pipeline.value_and_grad(params, batch)


@pytest.mark.slow
def test_a_pipeline_warns_once_for_each_of_what_it_is_given():
    def first(w, x, mb, *, state):
        return Outputs(jax.tree.leaves(mb)[0] @ w, state=state)

    stages = [Stage(first, params="first", state="seen"), Stage(lambda w, x, mb: jnp.sum(x @ w), params="last", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=MICRO_BATCHES, ipu_memory=LIMIT)

    def warnings_of(rows=ROWS, dtype="float32", name="x", width=16, seen=(3,), seen_dtype="float32"):
        params = pipeline.shard({"first": jnp.ones((8, width)), "last": jnp.ones((width, 32))})
        state = pipeline.shard_state({"seen": np.ones(seen, seen_dtype)})
        batch = {name: jax.ShapeDtypeStruct((MICRO_BATCHES, rows, 8), dtype)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.eval_shape(pipeline.value_and_grad, params, batch, state)
        return len(caught)

    given = [{}, {"rows": 2 * ROWS}, {"dtype": "float16"}, {"name": "y"}, {"width": 32}, {"seen": (500,)}]
    given.append({"seen_dtype": "int32"})
    assert [warnings_of(**changed) for changed in given] == [1] * len(given)
    assert [warnings_of(**changed) for changed in given] == [0] * len(given)


@pytest.mark.parametrize("size", [0, -1, float("nan"), "900 MB", True])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="is not a size: give bytes above 0"):
        two_stages(ipu_memory=size)
    pipeline = two_stages()
    with pytest.raises(ValueError, match="is not a size"):
        pipeline.report(*arguments(pipeline), compile=False, ipu_memory=size)


def test_what_a_step_refuses_a_report_refuses():
    pipeline = two_stages()
    params, batch = arguments(pipeline)
    with pytest.raises(ValueError, match="leading dims"):
        pipeline.report(params, jax.ShapeDtypeStruct((3, ROWS, 8), "float32"))
    with pytest.raises(ValueError, match=r"pass what pipeline\.shard"):
        pipeline.report({"first": 1}, batch)  # pyright: ignore[reportArgumentType]
