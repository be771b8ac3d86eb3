"""Test batches on the mesh: they have the same rows as a loop over the source, however they are placed and made."""

import itertools
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax import Feed, Pipeline, Stage, make_mesh
from ipu_jax.io import FeedTimeoutError, normalise
from ipu_jax.training.data.prefetch import Prefetcher
from support import across_feeds
from support.programs import run_instances
from support.refusals import refused

ROOT = Path(__file__).parents[4]
N = 101
# prefetch and workers: by the caller, by one worker, by several
LOADING = [(0, 1), (2, 1), (4, 3)]


def examples(count=N):
    random = np.random.default_rng(0)
    return {
        "images": random.integers(0, 256, (count, 3, 2), dtype=np.uint8),
        "half": random.normal(size=(count, 4)).astype(ml_dtypes.bfloat16),
        "number": np.arange(count),
    }


def numbers(count=N):
    return {"number": np.arange(count)}


def dense(source, *, lead, per_batch, epoch=0, seed=0):
    """Return the batches of an epoch by a plain loop: leaves by name, with dims `lead`; the remainder is left out."""
    order = np.arange(len(source["number"]))
    np.random.default_rng([seed, epoch]).shuffle(order)
    return [
        {name: leaf[order[start : start + per_batch]].reshape(*lead, *leaf.shape[1:]) for name, leaf in source.items()}
        for start in range(0, len(order) - per_batch + 1, per_batch)
    ]


def numbers_of(batch):
    return np.asarray(batch.data["number"]).reshape(-1)[batch.is_real.reshape(-1)].tolist()


# the contents of a batch, and its placement


@pytest.mark.parametrize(("prefetch", "workers"), LOADING)
@pytest.mark.parametrize(
    ("replicas", "ipus", "iterations", "lead", "spec"),
    [
        (1, 1, 1, (3, 2), PartitionSpec()),
        (1, 2, 2, (2, 3, 2), PartitionSpec(None)),
        (2, 2, 1, (2, 3, 2), PartitionSpec("replica")),
        (4, 2, 2, (2, 4, 3, 2), PartitionSpec(None, "replica")),
        (8, 1, 1, (8, 3, 2), PartitionSpec("replica")),
    ],
)
def test_batches_are_those_of_a_plain_loop(replicas, ipus, iterations, lead, spec, prefetch, workers):
    source, mesh = examples(), make_mesh(replicas, ipus)
    options = {"gradient_accumulation": 3, "device_iterations": iterations, "seed": 4, "epochs": 2}
    per_batch = 6 * replicas * iterations
    expected = [dense(source, lead=lead, per_batch=per_batch, epoch=epoch, seed=4) for epoch in (0, 1)]
    with Feed(source, mesh=mesh, micro_batch=2, prefetch=prefetch, workers=workers, **options) as feed:
        assert len(feed) == len(expected[0])
        found = list(feed)
        assert [batch.epoch for batch in found] == [0] * len(expected[0]) + [1] * len(expected[1])
        for batch, wanted in zip(found, itertools.chain(*expected), strict=True):
            assert (batch.examples, batch.updates) == (per_batch, iterations)
            assert batch.is_real.shape == lead
            assert batch.is_real.all()
            assert batch.nbytes == per_batch * (6 + 8 + 4)
            for name, leaf in batch.data.items():
                assert leaf.sharding == NamedSharding(mesh, spec)
                for shard in leaf.addressable_shards:  # also those that hold the same
                    np.testing.assert_array_equal(shard.data, wanted[name][shard.index])
                like = feed.like[name]
                assert (like.shape, like.dtype, like.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)


@pytest.mark.parametrize("instances", [1, 2, 4, 8])
@pytest.mark.parametrize("remainder", ["drop", "updates", "pad", "wrap"])
def test_instances_share_the_examples(instances, remainder):
    """Each instance has a mesh of its own; together they read what one instance with 8 replicas reads."""
    options = {"micro_batch": 1, "gradient_accumulation": 2, "device_iterations": 2, "remainder": remainder}
    make = lambda n, k: Feed(
        numbers(), mesh=make_mesh(8 // n, 1), instances=n, instance=k, seed=3, prefetch=0, epochs=2, **options
    )
    feeds = [make(1, 0), *(make(instances, k) for k in range(instances))]
    for batch, *parts in zip(*feeds, strict=True):
        rows = lambda batch, values: np.asarray(values).reshape(batch.is_real.shape[0], -1, 2)
        found = [rows(part, np.where(part.is_real, part.data["number"], -1)) for part in parts]
        expected = rows(batch, np.where(batch.is_real, batch.data["number"], -1))
        np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)
        assert {part.examples for part in parts} == {batch.examples}
    assert {tuple(feed.state().items()) for feed in feeds} == {tuple(feeds[0].state().items())}


@pytest.mark.parametrize("remainder", ["drop", "updates", "pad", "wrap"])
@pytest.mark.parametrize(("before", "after"), [((1, 8), (8, 8)), ((8, 8), (2, 8)), ((4, 4), (2, 6)), ((2, 2), (1, 1))])
def test_any_number_of_instances_goes_on_where_others_stopped(remainder, before, after):
    """Test (instances, replicas) before and after; the batches may have another size."""

    def read(instances, replicas, **more):
        options = {"micro_batch": 1, "gradient_accumulation": 2, "remainder": remainder, "epochs": 1, **more}
        mesh = make_mesh(replicas // instances, 1)
        feeds = [Feed(numbers(), mesh=mesh, instances=instances, instance=k, **options) for k in range(instances)]
        batches = list(itertools.islice(zip(*feeds, strict=True), 3 if "state" not in more else None))
        return [n for parts in batches for part in parts for n in numbers_of(part)], feeds[0].state()

    seen, state = read(*before, prefetch=0)
    then, _ = read(*after, prefetch=0, state=state)
    assert len({*seen, *then}) == len(seen + then)
    left_out = 0 if remainder in ("pad", "wrap") else (N - len(seen)) % (2 * after[1])
    assert len(seen + then) == N - left_out


@pytest.mark.parametrize(("remainder", "per_epoch"), [("drop", 3), ("pad", 4)])
def test_a_goal_among_examples_that_are_left_out_needs_no_further_update(remainder, per_epoch):
    feed = Feed(numbers(10), mesh=make_mesh(1, 1), micro_batch=3, remainder=remainder)
    assert [feed.updates_to(epoch, 10) for epoch in range(3)] == [per_epoch, 2 * per_epoch, 3 * per_epoch]
    assert [feed.position_after(per_epoch + more) for more in (-1, 0, 1)] == [(0, 3 * per_epoch - 3), (1, 0), (1, 3)]


def test_what_fills_up_is_said_to():
    source = {"x": np.arange(1, 8, dtype=np.uint8), "label": np.arange(7, dtype=np.int32)}

    def batches(micro_batch, **options):
        options |= {"mesh": make_mesh(1, 1), "device_iterations": 3, "shuffle": False, "prefetch": 0}
        return list(Feed(source, micro_batch=micro_batch, **options).epoch())

    padded = batches(2, remainder="pad", fill={"x": 0, "label": -1})
    assert [batch.data["label"].tolist() for batch in padded] == [
        [[[0, 1]], [[2, 3]], [[4, 5]]],
        [[[6, -1]], [[-1, -1]], [[-1, -1]]],
    ]
    wrapped = batches(2, remainder="wrap")[-1]
    assert wrapped.data["label"].tolist() == [[[6, 0]], [[1, 2]], [[3, 4]]]
    assert batches(5, remainder="wrap")[0].data["label"].reshape(-1).tolist() == [*range(7), *range(7), 0]
    for remainder in (padded[-1], wrapped):
        assert remainder.is_real.tolist() == [[[True, False]], [[False, False]], [[False, False]]]
        assert (remainder.examples, remainder.updates) == (1, 1)
    of_updates = batches(1, remainder="updates", fill=9)[-1]
    assert (of_updates.arrays["x"].tolist(), of_updates.updates) == ([[[7]], [[9]], [[9]]], 1)
    assert (of_updates.data["x"].tolist(), of_updates.is_real.tolist()) == ([[[7]]], [[[True]]])
    assert [len(batches(2, remainder=remainder)) for remainder in ("drop", "updates")] == [1, 1]


# continuing


def test_an_epoch_ends_and_the_next_one_begins():
    with Feed(numbers(10), mesh=make_mesh(1, 1), micro_batch=4) as feed:
        first, second = ([numbers_of(batch) for batch in feed.epoch()] for _ in range(2))
        assert [len(first), len(second), feed.state()["epoch"]] == [2, 2, 2]
        feed.seek(1)
        assert [numbers_of(batch) for batch in feed.epoch()] == second
        feed.seek(2)  # it is at this place already, so batches that are ready are kept
        next(feed)
        rest = list(feed.epoch())
        assert [len(rest), rest[0].epoch] == [1, 2]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_seeking_the_epoch_where_it_stands_goes_back_to_its_start(prefetch):
    with Feed(numbers(10), mesh=make_mesh(1, 1), micro_batch=2, prefetch=prefetch) as feed:
        first = [numbers_of(next(feed)) for _ in range(3)]
        feed.seek(0)
        assert feed.state()["position"] == 0
        assert [numbers_of(next(feed)) for _ in range(3)] == first


# sources that fail


class Photos:
    """An indexable that counts its calls, and calls a given function before it answers."""

    def __init__(self, before=lambda call, indices: None, count=N):
        self.calls, self._before, self._count = 0, before, count
        self._lock = threading.Lock()

    def __len__(self):
        return self._count

    def __getitem__(self, indices):
        with self._lock:
            call, self.calls = self.calls, self.calls + 1
        self._before(call, indices)
        return {"number": indices * 1}


def test_several_workers_read_at_once_in_order_and_no_further_ahead_than_prefetch():
    meet, is_ahead = threading.Barrier(3, timeout=60), threading.Event()

    def before(call, indices):
        if 1 <= call <= 3:  # the first call asks for the shape of an example
            meet.wait()  # who reads alone never gets past it
            is_ahead.wait(60) if indices[0] == 0 else is_ahead.set()

    photos = Photos(before)
    with Feed(photos, mesh=make_mesh(1, 1), micro_batch=2, shuffle=False, prefetch=3, workers=3) as feed:
        for batches in range(1, 6):
            assert numbers_of(next(feed)) == [2 * batches - 2, 2 * batches - 1]
            deadline = time.monotonic() + 60
            while photos.calls < 1 + batches + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)
            assert photos.calls == 1 + batches + 3


@pytest.mark.parametrize(("prefetch", "workers"), LOADING)
@pytest.mark.parametrize("kind", [OSError, StopIteration])
def test_what_the_source_raises_comes_in_its_turn_and_the_batch_can_be_had_again(kind, prefetch, workers):
    broken, error = [3], kind("the disk is gone")

    def before(call, indices):
        if call in broken:
            raise error

    photos = Photos(before)
    options = {"micro_batch": 10, "prefetch": prefetch, "workers": workers}
    expected = [batch["number"].tolist() for batch in dense(numbers(), lead=(10,), per_batch=10)]
    found = []
    with Feed(photos, mesh=make_mesh(1, 1), epochs=1, **options) as feed:
        with pytest.raises((OSError, RuntimeError)) as raised:
            found.extend(numbers_of(batch) for batch in feed)
        broken.clear()
        assert len(found) < 3 + workers  # with several workers, it depends on chance which call reads which batch
        if workers == 1:
            assert len(found) == 2
        found += [numbers_of(batch) for batch in feed]
    assert found == expected
    if isinstance(error, OSError):
        assert raised.value is error
        assert "before" in [entry.name for entry in raised.traceback]
        note = "\n".join(getattr(error, "__notes__", ()))
        assert re.fullmatch(r"raised by feed worker \d at the batch from .*" if prefetch else "", note)
    else:
        assert str(raised.value) == "the source raised StopIteration"


def test_a_source_that_hangs_is_an_error_in_time_and_may_still_answer():
    release = threading.Event()
    photos = Photos(lambda call, indices: 10 in indices and release.wait(60))
    options = {"micro_batch": 10, "shuffle": False, "prefetch": 2, "workers": 2, "timeout": 0.1}
    busy = r"worker \d has been at the batch from example 10 of epoch 0 on for \d\.\d s, now in \S+:\d+ \(wait\)"
    each = rf"({busy}; worker \d waits|worker \d waits; {busy})"
    with Feed(photos, mesh=make_mesh(1, 1), **options) as feed:
        next(feed)
        with pytest.raises(
            FeedTimeoutError, match=rf"^nothing arrived within 0\.1 s: {each}\. Mend the source"
        ) as late:
            next(feed)
        assert re.match(r"Stack of worker \d:\n", late.value.__notes__[0])
        assert "release.wait(60)" in late.value.__notes__[0]
        release.set()
        assert numbers_of(next(feed)) == [*range(10, 20)]


def test_ctrl_c_loses_no_batch_that_was_made(monkeypatch):
    """It comes when the batch has been taken from the workers but the feed has not counted it yet."""
    take, taken = Prefetcher.take, []

    def interrupted(prefetcher):
        result = take(prefetcher)
        taken.append(result)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Prefetcher, "take", interrupted)
    found = []
    with Feed(numbers(), mesh=make_mesh(1, 1), micro_batch=10, epochs=1, workers=2) as feed:
        with pytest.raises(KeyboardInterrupt):
            found.extend(numbers_of(batch) for batch in feed)
        assert feed.state()["position"] == 20
        found += [numbers_of(batch) for batch in feed]
    assert found == [batch["number"].tolist() for batch in dense(numbers(), lead=(10,), per_batch=10)]


def test_a_closed_feed_hands_out_nothing_but_its_state():
    feed = Feed(numbers(), mesh=make_mesh(1, 1), micro_batch=2)
    with feed:
        next(feed)
    feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed worker")]
    with refused("the feed is closed", "`with` block"):
        next(feed)
    assert feed.state()["position"] == 2


@pytest.mark.slow
def test_a_feed_that_nobody_closes_ends_with_the_interpreter():
    code = """
import numpy as np
from ipu_jax import Feed, make_mesh
feed = Feed({"x": np.arange(1000)}, mesh=make_mesh(1, 1), micro_batch=2, prefetch=4, workers=4)
print(int(next(feed).data["x"].shape[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


# integers of NumPy


def test_numpys_integers_are_taken_as_pythons_own():
    given: Any = {"micro_batch": 2, "gradient_accumulation": 3, "device_iterations": 1, "instances": 2, "instance": 1}
    given = {name: np.uint8(value) for name, value in (given | {"prefetch": 0, "epochs": 3, "seed": 5}).items()}
    epoch: Any = np.int64(1)
    feed = Feed(numbers(), mesh=make_mesh(1, 1), **given)
    feed.seek(epoch)
    assert (type(feed.prefetch), feed.prefetch) == (int, 0)
    assert {type(value) for value in feed.state().values()} == {int}
    assert feed.state()["epoch"] == 1
    assert {type(value) for name, value in next(feed).feed.items() if name != "remainder"} == {int}


# with a pipeline


def test_bytes_from_the_feed_give_the_loss_and_gradients_of_floats_on_one_device():
    """2 replicas of 2 IPUs, images as bytes normalised in the first stage, against floats normalised on the host."""
    source = {"images": examples(48)["images"], "target": np.linspace(-1, 1, 48, dtype=np.float32)}
    random = np.random.default_rng(1)
    weights = {"first": random.normal(size=(6, 5)), "last": random.normal(size=(5,))}
    weights = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights)

    def first(w, _, microbatch):
        return jnp.tanh(normalise(microbatch["images"], mean=0.4, std=0.3).reshape(-1, 6) @ w)

    def last(w, x, microbatch):
        return jnp.mean((x @ w - microbatch["target"]) ** 2)

    def dense_loss(params, images, target):
        floats = (images.astype(np.float32) / np.float32(255) - np.float32(0.4)) / np.float32(0.3)
        return jnp.mean((jnp.tanh(floats.reshape(-1, 6) @ params["first"]) @ params["last"] - target) ** 2)

    stages = [Stage(first, params="first", ipu=0), Stage(last, params="last", ipu=1)]
    pipeline = Pipeline(stages, mesh=make_mesh(2, 2), gradient_accumulation=3)
    dense_step = jax.jit(jax.value_and_grad(dense_loss))
    sharded = pipeline.shard(weights)
    order = np.arange(48)
    np.random.default_rng([0, 0]).shuffle(order)
    with Feed(source, mesh=pipeline.mesh, micro_batch=4, gradient_accumulation=3, workers=2) as feed:
        for chosen, batch in zip((order[:24], order[24:]), feed.epoch(), strict=True):
            assert batch.data["images"].dtype == jnp.uint8
            loss, gradients = pipeline.value_and_grad(sharded, batch.data)
            wanted, of_dense = dense_step(weights, source["images"][chosen], source["target"][chosen])
            np.testing.assert_allclose(loss, wanted, rtol=1e-5)
            for name, gradient in pipeline.unshard(gradients).items():
                np.testing.assert_allclose(gradient, of_dense[name], rtol=1e-4, atol=1e-6)


# several processes


@pytest.mark.slow
def test_two_processes_fill_one_mesh():
    """The second batch is filled up with -1."""
    numbers = np.append(np.arange(20), np.full(12, -1)).reshape(2, 4, 4)
    found = run_instances(across_feeds.fed, [2, 2], replicas=4, ipus=1, each=[{"examples": 20, "shuffle": False}])
    for me, results in enumerate(found):
        rows = {name: values.tolist() for name, values in results.items() if "replica" in name}
        assert rows == {
            f"0 batch {at} replica {replica}": numbers[at, replica].tolist()
            for at in range(2)
            for replica in (2 * me, 2 * me + 1)
        }
        assert [results[f"0 batch {at} counts"].tolist() for at in range(2)] == [[16, 1], [4, 1]]


def test_the_error_of_a_stuck_worker_comes_at_the_time_limit_and_the_source_is_not_read_twice_at_once():
    answers, reading, most = threading.Event(), list[int](), list[int]()

    class Slow:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: np.ndarray) -> np.ndarray:
            reading.append(1)
            most.append(len(reading))
            answers.wait(60)
            reading.pop()
            return np.asarray(index, np.int32)

    answers.set()  # a feed reads an example when it is made
    feeds = [Feed(Slow(), mesh=make_mesh(1, 1), micro_batch=2, timeout=t, shuffle=False) for t in (0.2, 60)]
    answers.clear()
    feed = feeds[0]
    with pytest.raises(FeedTimeoutError, match=r"nothing arrived within 0\.2 s"):
        next(feed)
    with pytest.raises(RuntimeError, match="of the caller"), feed:
        raise RuntimeError("an error of the caller")
    assert reading == [1], "it waited for the worker"
    answers.set()
    feed.close()

    answers.clear()
    with feeds[1] as feed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Prefetcher, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(feed)
        threading.Timer(0.3, answers.set).start()
        assert next(feed).data.tolist() == [[0, 1]]
    assert max(most) == 1


def interrupted(prefetcher: Prefetcher) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_batch_has_the_facts_that_the_feeds_of_all_instances_share(prefetch):
    with Feed({"x": np.arange(12)}, mesh=make_mesh(2, 1), micro_batch=2, seed=7, epochs=2, prefetch=prefetch) as feed:
        batches = list(feed)
    places = [(batch.feed["epoch"], batch.feed["position"]) for batch in batches]
    assert places == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8)]
    expected = {"examples": 12, "seed": 7, "shuffle": 1, "epochs": 2, "remainder": "drop", "micro_batch": 2}
    expected |= {"gradient_accumulation": 1, "replicas": 2, "device_iterations": 1, "epoch": 0, "position": 0}
    assert batches[0].feed == expected
    with Feed([{"x": 1}] * 8, items="examples", mesh=make_mesh(2, 1), micro_batch=2) as feed:
        assert next(feed).feed["examples"] == 8
    with Feed(iter([{"x": 1}] * 8), items="examples", mesh=make_mesh(2, 1), micro_batch=2) as feed:
        assert [batch.feed["position"] for batch in (next(feed), next(feed))] == [0, 4]
