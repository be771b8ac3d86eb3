"""Test what a feed refuses: its options, orders and states, its sources, and the items that a stream gives."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from ipu_jax import Feed, make_mesh
from ipu_jax.io import normalise
from ipu_jax.training.data.leaves import filling
from ipu_jax.training.data.source import ArraySource, ExampleSource
from support.refusals import refusals, refused

STATE = {"epoch": 0, "position": 5, "examples": 101, "seed": 0, "shuffle": 1}
RETURNED = "give what state() returned"
ALIKE = "give all alike"
FILL_UP = "remainder='pad' or 'wrap'"
NUMBERS_ONLY = "IPUs hold numbers and bools only"


def feed_of(**options):
    return Feed({"number": np.arange(101)}, **{"mesh": make_mesh(1, 1), "micro_batch": 2, **options})


class Answers:
    """An indexable that gives these answers, one after the other."""

    def __init__(self, *answers, count=5):
        self._answers, self._count = iter(answers), count

    def __len__(self):
        return self._count

    def __getitem__(self, indices):
        return next(self._answers)


class WithGradient:
    """Like a tensor of torch that NumPy cannot convert."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


ROWS = "give arrays with an example a row"
STREAM = "items='examples' if it has one example after the other"
ONE = "items='examples' if it returns the one example of an int"
AN_ARRAY = [np.zeros((1, 2))]


def then(*answers):
    """Read four examples of an indexable whose first example was a vector of two float32."""
    ArraySource(Answers(AN_ARRAY, *answers)).read(np.array([4, 0, 4, 2]))


def second(*rows):
    ExampleSource(list(rows)).read(np.array([0, 1]))


def fill(value, dtype):
    filling(value, ArraySource([np.zeros(3, dtype)]).like)


def examples(epoch=0, count=23, times=1):
    return ({"number": k * times} for k in range(count))


def from_stream(source: Any = examples, read=1, **options):
    """Read a stream's first batches."""
    given: dict[str, Any] = {"items": "examples", "micro_batch": 4, "prefetch": 0, "mesh": make_mesh(1, 1), **options}
    with Feed(source, **given) as feed:
        for _ in range(read):
            next(feed)
        return feed.state()


AFTER = "one item after the other"
ONCE = "a fresh iterator, such as lambda epoch: read(files)"


@refusals(
    (lambda: feed_of(prefetch=-1), "prefetch=-1", "a number of batches", "an int of at least 0"),
    (lambda: feed_of(workers=0), "workers=0", "not a count", "an int of at least 1"),
    (lambda: feed_of(workers=3, prefetch=2), "workers=3", "prefetch=2", "fewer workers, or prefetch=3"),
    (lambda: feed_of(workers=2, prefetch=0), "workers=2", "prefetch=0", "fewer workers, or prefetch=2"),
    (lambda: feed_of(timeout=0.0), "timeout=0.0", "a number of seconds", "such as 120"),
    (lambda: feed_of(epochs=0), "epochs=0", "not a count", "an int of at least 1"),
    *(
        (lambda bad=bad: feed_of(instances=2, instance=bad), f"instance={bad}", "not one of instances=2", "from 0 on")
        for bad in (-1, 2, True)
    ),
    (lambda: feed_of(micro_batch=0), "micro_batch=0", "not a count", "an int of at least 1"),
    (lambda: feed_of(device_iterations=-1), "device_iterations=-1", "not a count", "an int of at least 1"),
    *(
        (lambda bad=bad: feed_of(seed=bad), f"seed={bad!r}", "not a seed", "an int of at least 0")
        for bad in (-1, True, 1.0, None, np.float32(1))
    ),
    (lambda: feed_of(remainder="wraps"), "remainder='wraps'", "did you mean 'wrap'?", "'drop', 'updates', 'pad', 'w"),
    (lambda: feed_of(instances=6, device_iterations=9), "=2 x replicas=6 x device_iterations=9", "108 ex", FILL_UP),
    (lambda: feed_of(instances=51, remainder="updates"), "=2 x replicas=51", "102 examples for an", FILL_UP),
    (lambda: feed_of(micro_batch=64, gradient_accumulation=2), "=64 x gradient_accumulation=2", "128 ex", FILL_UP),
    (lambda: feed_of(fill="x"), "fill='x' at source['number']", "is not of dtype int32", "a number that it holds"),
    (lambda: feed_of(state=7), "state=7", RETURNED),
    (lambda: feed_of(state={"epoch": 1}), "state={'epoch': 1}", RETURNED),
    (lambda: feed_of(state=STATE | {"position": 102}), "'position': 102", RETURNED),
    (lambda: feed_of(mesh=Mesh(jax.devices()[:1], ("data",))), "axes ('data',)", "not 'replica'", "make_mesh("),
    (lambda: feed_of().seek(-1), "epoch=-1", "not an epoch", "an int of at least 0"),
    (lambda: feed_of(step=3, mesh=None), "step=3", "not a training step", "make it with"),
    (lambda: feed_of(mesh=None), "neither step= nor mesh= is given", "step=step"),
    (lambda: normalise(np.zeros(3, np.float32)), "float32", "give bytes, uint8"),
    # sources
    (lambda: ArraySource({"x": np.zeros((0, 2))}), "holds no examples", ROWS),
    (lambda: ArraySource({}), "holds no examples", ROWS),
    (lambda: ArraySource(Answers(count=0)), "holds no examples", ROWS),
    (lambda: ArraySource({"x": [1, 2]}), "source['x'][0] is of type int", ROWS),
    (lambda: ArraySource("digits"), "source is of type str", ROWS),
    (lambda: ArraySource(np.float32(3)), "source is of type float32", ROWS),
    (lambda: ArraySource(iter([1])), "source is of type list_iterator", STREAM, ROWS),
    (lambda: ArraySource(lambda epoch: iter([1])), "source is of type function", STREAM, ROWS),
    (lambda: ArraySource(Answers({})), "without any array", ROWS),
    (lambda: ArraySource((np.zeros(3), {"y": np.zeros(4)})), "3 at source[0], 4 at source[1]['y']", "a row of each"),
    (lambda: ArraySource(np.array(["a", "b"])), "<U1 at source", NUMBERS_ONLY),
    (lambda: ArraySource([np.array([{}, {}])]), "object at source[0]", NUMBERS_ONLY),
    # what an indexable gives later
    (lambda: then([np.zeros((4, 2)), np.zeros(4)]), "PyTreeDef([*, *]) for 4 examples", "PyTreeDef([*])", ALIKE),
    (lambda: then([np.zeros((4, 3), np.int32)]), "int32 (3,) at source[0]", "float32 (2,)", ALIKE),
    (lambda: then([np.zeros((3, 2))]), "shape (3, 2) at source[0] for 4 examples", "give arrays (4, ...)", ONE),
    (lambda: then([1.0]), "float at source[0] for 4 examples", "give arrays (4, ...)", ONE),
    (lambda: Feed(Answers(np.zeros(3)), mesh=make_mesh(1, 1), micro_batch=2), "the source gave", ONE),
    # examples one at a time
    (lambda: ExampleSource([]), "a list, holds no examples", "give at least one"),
    (lambda: ExampleSource([{"text": "a cat"}]), "example 0 has str at example['text']", NUMBERS_ONLY, "leave it out"),
    (lambda: ExampleSource([{"x": np.array(["a"])}]), "example 0 has <U1 at example['x']", NUMBERS_ONLY),
    (lambda: ExampleSource("digits"), "example 0 has str at example", NUMBERS_ONLY, "leave it out"),
    (lambda: ExampleSource([{"x": [[1, 2], [3]]}]), "example 0 has no array at example['x']", "inhomogeneous"),
    (lambda: second({"x": [1, 2]}, {"x": [1, 2, 3]}), "example 1 has int64 (3,) at example['x']", "int32 (2,)", ALIKE),
    (lambda: second({"x": 1, "y": 2}, {"x": 1, "y": None}), "example 1 lacks example['y']", ALIKE),
    (lambda: second((1, 2), [np.zeros(2), 1]), "example 1 has the structure PyTreeDef([*, *])", "((*, *))", ALIKE),
    (
        lambda: second({"x": 1}, {"x": WithGradient()}),
        "example 1 has no array at example['x']",
        "convert it",
        "requires g",
    ),
    (lambda: second(1, object()), "example 1 has object at example", NUMBERS_ONLY, "leave it out"),
    # values that fill up a batch
    (lambda: fill(-1, np.uint8), "fill=-1 at source[0]", "not of dtype uint8", "a number that it holds"),
    (lambda: fill(0.5, np.int32), "fill=0.5 at source[0]", "not of dtype int32", "a number that it holds"),
    (lambda: fill("a", np.float32), "fill='a' at source[0]", "not of dtype float32", "a number that it holds"),
    (lambda: fill({"x": 1}, np.float32), "fill={'x': 1}", "neither a number nor a pytree of numbers"),
    # streams
    (lambda: from_stream(shuffle=True), "shuffle=True", AFTER, "let the source shuffle"),
    (lambda: from_stream(shuffle="no"), "shuffle='no'", "not a bool", "give True or False"),
    (lambda: from_stream(seed=3), "seed=3", AFTER, "let the source shuffle"),
    (lambda: from_stream(workers=2, prefetch=2), "workers=2", AFTER, "use workers=1"),
    (lambda: from_stream(remainder="wrap"), "remainder='wrap'", AFTER, "use 'drop', 'updates' or 'pad'"),
    (lambda: from_stream(items="example"), "items='example'", "did you mean 'examples'?", "'examples', 'batches'"),
    (lambda: from_stream(micro_batch=24), "micro_batch=24", "24 examples for a batch", "are 23", "remainder='pad'"),
    (lambda: from_stream(lambda: examples()), "<lambda>()", "the number of an epoch", ONCE),
    (lambda: from_stream(lambda epoch: 7), "returned a value of type int", ONCE),
    (lambda: from_stream(lambda epoch: iter(())), "epoch 0", "no examples", "give at least one"),
    (lambda: from_stream(7), "type int", AFTER, "give an iterable"),
    (lambda: from_stream({"x": np.zeros(3)}), "type dict", AFTER, "leave items out"),
    (lambda: from_stream(lambda epoch: iter([{}])), "example 0 of epoch 0", "no arrays", "a dict, a tuple or an array"),
    (
        lambda: from_stream([{"x": 3}], items="batches"),
        "int64 at example['x']",
        "without a dim of examples",
        "items='examples'",
    ),
    (lambda: from_stream(state=7), "state=7", "not a state of a stream", RETURNED),
    (lambda: from_stream(state={"epoch": 0}), "state={'epoch': 0}", "not a state of a stream", RETURNED),
    (lambda: from_stream(state=from_stream() | {"beyond": -1}), "'beyond': -1", "not a state of a stream", RETURNED),
    (lambda: from_stream(state=from_stream() | {"beyond": 5}), "'beyond': 5", "not a state of a stream", RETURNED),
    # what cannot be read again
    (lambda: from_stream(examples(count=4), read=2), "a generator", "batch from example 0 of epoch 1 on", ONCE),
    (lambda: from_stream(examples(), state=from_stream()), "a generator", "example 4 of epoch 0", ONCE),
    (
        lambda: from_stream(lambda epoch: examples(1, 9, -1), state=from_stream()),
        "example 4 of epoch 0",
        "state_dict and",
    ),
    (lambda: from_stream(lambda epoch: examples(0, 3), state=from_stream()), "ended at example 3", "state was saved"),
    (lambda: from_stream([{"number": [0]}] * 3, items="batches", state=from_stream()), "ended at", "was saved"),
    (lambda: from_stream(state=from_stream() | {"source": {"next": 4}}), "own state", "no load_state_dict", "give a"),
)
def test_what_a_feed_is_given_is_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (2, 2), (4, 4)])
def test_prefetch_follows_the_workers(workers, ahead):
    with feed_of(workers=workers) as feed:
        assert (feed.workers, feed.prefetch) == (workers, ahead)


@pytest.mark.parametrize(("epoch", "position"), [(0, 0), (0, 40), (3, 0), (3, 100)])
@pytest.mark.parametrize(
    ("name", "given"), [("examples", 102), ("examples", 1000), ("seed", 1), ("seed", 6), ("shuffle", 0)]
)
def test_a_state_of_another_order_is_refused_by_name_wherever_it_is(name, given, epoch, position):
    """Also at the start of an epoch and behind its end. A feed of the state's own order takes each of them."""
    orders = [{name: STATE[name] for name in ("examples", "seed", "shuffle")}]
    orders.append(orders[0] | {name: given})

    def taken(order, state):
        source, options = np.arange(order["examples"]), {"seed": order["seed"], "shuffle": bool(order["shuffle"])}
        Feed(source, mesh=make_mesh(1, 1), micro_batch=2, state=state, **options).close()

    for mine, theirs in (orders, orders[::-1]):
        state = {"epoch": epoch, "position": position, **theirs}
        with refused(f"state is of {name}={theirs[name]}", f"the feed has {name}={mine[name]}", "lost or read twice"):
            taken(mine, state)
        taken(theirs, state)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("items", "change", "holds"),
    [
        ("examples", {"x": None}, ["lacks example['x']", ALIKE]),
        ("examples", {"mask": 1}, ["has example['mask']", "lacks", ALIKE]),
        ("examples", {"x": np.zeros(4)}, ["float64 (4,) at example['x']", "float32 (3,)", ALIKE]),
        ("examples", {"label": 1.5}, ["float64 () at example['label']", "int32 ()", ALIKE]),
        ("examples", {"label": 2**40}, ["1099511627776 at example['label']", "int32 cannot hold", "jax_enable_x64"]),
        ("examples", {"label": "cat"}, ["str at example['label']", NUMBERS_ONLY, "leave it out"]),
        ("batches", {"label": [1, 2, 3]}, ["3 at example['label'], 2 at example['x']", "give a row of each"]),
        ("batches", {"x": np.zeros((2, 4))}, ["float64 (4,) at example['x']", "float32 (3,)", ALIKE]),
    ],
)
def test_an_item_unlike_the_first_is_named_with_its_number_and_leaf(items, change, holds, prefetch):
    def changing(epoch):
        for k in range(12 if items == "examples" else 6):
            good = {"label": k, "x": np.zeros(3)} if items == "examples" else {"label": [k, k], "x": np.zeros((2, 3))}
            is_bad = k == (9 if items == "examples" else 4)
            yield good | change if is_bad else good

    where = {"examples": "example 9 of epoch 0", "batches": "the batch from example 8 of epoch 0 on"}
    with Feed(changing, items=items, mesh=make_mesh(1, 1), micro_batch=4, prefetch=prefetch) as feed:
        for _ in range(2):
            next(feed)
        with refused(where[items], *holds):
            next(feed)
