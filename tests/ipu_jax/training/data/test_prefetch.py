"""Test that work ahead on threads holds nothing that was handed out and that the threads end; see also test_feed."""

import gc
import threading
import time
import weakref
from contextlib import closing

import pytest

from ipu_jax.training.data import prefetch
from ipu_jax.training.data.prefetch import FeedTimeoutError, Prefetcher

SECONDS = 60.0


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed worker")]


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def ready(made):
    return len(made._shared.results)


@pytest.mark.parametrize("workers", [1, 3])
def test_nobody_holds_what_was_handed_out(workers):
    """Neither a worker that waits for its turn holds it, nor one that makes the next batch."""
    made = []

    class Batch:
        def __init__(self, number):
            made.append(weakref.ref(self))

    with closing(Prefetcher(Batch, iter(range(100)), ahead=2, workers=workers, seconds=SECONDS)) as batches:
        for _ in range(30):
            batches.take()
            wait_until(lambda: ready(batches) == 2)
            wait_until(lambda: sum(batch() is not None for batch in made) == 2)


def test_after_an_error_no_further_item_is_begun():
    begun = []

    def make(number):
        begun.append(number)
        return 1 / (1 - number)

    with closing(Prefetcher(make, iter(range(9)), ahead=9, workers=1, seconds=SECONDS)) as made:
        wait_until(lambda: not workers() or len(begun) > 2)
        assert begun == [0, 1]
        assert made.take() == 1
        with pytest.raises(ZeroDivisionError):
            made.take()


def test_workers_that_have_ended_are_said_to():
    made = Prefetcher(str, iter([]), ahead=1, workers=1, seconds=0.05)
    with pytest.raises(FeedTimeoutError, match=r"^nothing arrived within 0\.05 s: worker 0 has ended\. Mend"):
        made.take()


def test_a_worker_that_cannot_be_ended_is_an_error(monkeypatch):
    monkeypatch.setattr(prefetch, "_STOP_SECONDS", 0.05)
    release, begun = threading.Event(), threading.Event()

    def stuck(number):
        begun.set()
        release.wait(SECONDS)

    made = Prefetcher(stuck, iter(range(9)), ahead=1, workers=1, seconds=SECONDS)
    assert begun.wait(SECONDS)
    with pytest.raises(FeedTimeoutError, match=r"^a worker did not end within 0\.05 s: worker 0 has been at 0 for "):
        made.close()
    release.set()
    wait_until(lambda: not workers())
    made.close()


def test_one_that_nobody_closes_ends_when_it_is_forgotten():
    made = Prefetcher(str, iter(range(9)), ahead=2, workers=2, seconds=SECONDS)
    made.take()
    del made
    gc.collect()
    assert not workers()
