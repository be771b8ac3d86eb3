"""Test where the digits come from, and the errors for broken files. No test needs the network."""

import functools
import gzip
import http.server
import logging
import re
import socket
import struct
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import mnist_example.data
from mnist_example.data import load_mnist, synthetic_mnist
from support.mnist_instance import NAMES, arrays_of, idx, write_digits

MEND = "put the four MNIST files there, or leave --data-dir out to download them"
FILES = synthetic_mnist(seed=0, n_train=7, n_test=3)
ARRAYS = arrays_of(FILES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a data dir with seven training digits and three test digits, zipped."""
    return write_digits(tmp_path / "data", FILES)


@pytest.fixture(autouse=True)
def no_data_but_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def assert_is_the_folder(digits: mnist_example.data.MNIST):
    for name, array in arrays_of(digits).items():
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, ARRAYS[name])


# -- a folder ------------------------------------------------------------------------------------------------------


def test_a_folder_loads_zipped_or_not(folder):
    digits = load_mnist(folder)
    assert_is_the_folder(digits)
    assert digits.source == f"MNIST from --data-dir {folder}"
    (folder / f"{NAMES[0]}.gz").write_bytes(idx(ARRAYS[NAMES[0]]))  # a browser unzipped it without renaming it
    assert_is_the_folder(load_mnist(folder))
    for name in NAMES:
        (folder / f"{name}.gz").unlink()
        (folder / name).write_bytes(idx(ARRAYS[name]))
    assert_is_the_folder(load_mnist(str(folder)))


def test_the_environment_names_a_folder_and_the_argument_wins(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MNIST_DIR", str(folder))
    digits = load_mnist()
    assert_is_the_folder(digits)
    assert digits.source == f"MNIST from $MNIST_DIR {folder}"
    with pytest.raises(ValueError, match=r"^--data-dir .*elsewhere is not a folder"):
        load_mnist(tmp_path / "elsewhere")


IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = (f"{name}.gz" for name in NAMES)
of_shape = lambda *shape, dims=3: struct.pack(f">4B{len(shape)}I", 0, 0, 8, dims, *shape)
LARGE = np.random.default_rng(0).bytes(1 << 20)
CLAIMS = of_shape(900_000, 28, 28)
MANY_LABELS = gzip.compress(idx(np.zeros(900_000, np.uint8)))
ZEROS = gzip.compress(bytes(1 << 22))  # 4 MB, in 4 KB
ZIPPED = {f"{name}.gz": gzip.compress(idx(array)) for name, array in ARRAYS.items()}
DAMAGED = bytearray(ZIPPED[TEST_IMAGES])
DAMAGED[len(DAMAGED) // 2] ^= 0xFF
BROKEN = "is broken or truncated, it cannot be unzipped"


@pytest.mark.parametrize(
    ("files", "holds"),
    [
        ({IMAGES: b""}, ("starts with nothing, not with 00000803",)),
        ({IMAGES: b"\0\0\x08"}, ("starts with 000008, not with 00000803",)),
        ({IMAGES: b"<html>not found</html>"}, ("starts with 3c68746d, not with 00000803",)),
        ({IMAGES: idx(ARRAYS[NAMES[1]])}, ("starts with 00000801, not with 00000803",)),
        ({LABELS: idx(ARRAYS[NAMES[0]])}, ("starts with 00000803, not with 00000801",)),
        ({IMAGES: b"\0\0\x08\x03\0\0"}, ("truncated", "header", "6 bytes")),
        ({IMAGES: idx(ARRAYS[NAMES[0]])[:-1]}, ("truncated", "(7, 28, 28)", "5488 bytes, not 5487")),
        ({IMAGES: idx(ARRAYS[NAMES[0]]) + b"!"}, ("too long", "(7, 28, 28)", "5488 bytes", "more follow")),
        ({IMAGES: of_shape(1_000_001, 28, 28)}, ("1,000,001, more than 1,000,000",)),
        ({IMAGES: of_shape(7, 1 << 20, 28)}, ("images of 1048576x28, not 28x28",)),
        ({TEST_LABELS: of_shape((1 << 32) - 1, dims=1)}, ("4,294,967,295, more than 1,000,000",)),
        ({IMAGES: idx(np.zeros((7, 8, 8), np.uint8))}, ("images of 8x8, not 28x28",)),
        ({IMAGES: idx(np.zeros((0, 28, 28), np.uint8))}, ("holds nothing", "(0, 28, 28)")),
        ({LABELS: idx(np.full(7, 12, np.uint8))}, ("holds 12", "number 0", "go to 9")),
        ({LABELS: idx(np.array([0, 9, 1, 2, 3, 10, 255], np.uint8))}, ("holds 10", "number 5", "go to 9")),
        ({TEST_LABELS: idx(np.array([9, 0, 255], np.uint8))}, ("holds 255", "number 2", "go to 9")),
        ({LABELS: idx(np.zeros(6, np.uint8))}, ("7 images", LABELS, "6 labels")),
        ({TEST_IMAGES: ZIPPED[TEST_IMAGES][:5]}, (BROKEN,)),
        ({TEST_IMAGES: ZIPPED[TEST_IMAGES][:30]}, (BROKEN,)),
        ({TEST_IMAGES: ZIPPED[TEST_IMAGES][:200]}, (BROKEN,)),
        ({TEST_IMAGES: bytes(DAMAGED)}, (BROKEN,)),
        # no more is unzipped than the header says, and what it claims is refused before it is read: 1 GB of 1 MB
        ({IMAGES: ZIPPED[IMAGES] + 256 * ZEROS}, ("too long", "5488 bytes", "more follow")),
        ({IMAGES: CLAIMS, LABELS: MANY_LABELS}, ("truncated", "705600000 bytes, not 0:")),
        ({IMAGES: gzip.compress(CLAIMS), LABELS: MANY_LABELS}, ("truncated", "705600000 bytes, not at most ")),
        (
            {IMAGES: gzip.compress(CLAIMS) + 32 * ZEROS, LABELS: MANY_LABELS},
            ("truncated", "705600000 bytes, not at most 13"),
        ),
        ({IMAGES: gzip.compress(CLAIMS) + LARGE}, ("900000 images", "7 labels")),
        ({IMAGES: gzip.compress(CLAIMS) + LARGE, LABELS: MANY_LABELS}, (BROKEN,)),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_a_broken_file_is_named_with_what_is_wrong_before_more_is_read(folder, files, holds):
    is_zipped = any(content[:2] == b"\x1f\x8b" for content in files.values())
    for write in (bytes,) if is_zipped else (bytes, gzip.compress):
        for name, content in files.items():
            (folder / name).write_bytes(write(content))
        begun = time.process_time()
        tracemalloc.start()
        with pytest.raises(ValueError, match=re.escape(f"{folder / next(iter(files))} ")) as caught:
            load_mnist(folder)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [text for text in (*holds, MEND) if text not in str(caught.value)] == []
        if holds == (BROKEN,) and LABELS in files:
            written -= 705_600_000  # never touched
        assert written < 1 << 23
        assert time.process_time() - begun < 1


def test_a_folder_that_is_none_or_lacks_files_is_named(folder, monkeypatch):
    for name in (IMAGES, TEST_LABELS):
        (folder / name).unlink()
    for given, told in (
        (folder / LABELS, f"--data-dir {folder / LABELS} is not a folder: {MEND}"),
        (folder, f"--data-dir {folder} lacks {IMAGES}, {TEST_LABELS}: {MEND}"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            load_mnist(given)
    monkeypatch.setenv("MNIST_DIR", str(folder / "none"))
    mend = re.escape(MEND.replace("leave --data-dir out", "unset MNIST_DIR"))
    with pytest.raises(ValueError, match=rf"^\$MNIST_DIR .*none is not a folder: {mend}$"):
        load_mnist()


# -- downloads, from a server of ours ------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    """Serve a folder's files, and return their URL."""
    servers = []

    def start(directory: Path) -> str:
        handler = functools.partial(Quiet, directory=str(directory))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def our_checksums(folder, monkeypatch):
    """Make the small files those that a download is expected to return."""
    sums = {f"{name}.gz": mnist_example.data.pooch.file_hash(str(folder / f"{name}.gz")) for name in NAMES}
    monkeypatch.setattr(mnist_example.data, "_SHA256", sums)


@pytest.mark.usefixtures("our_checksums")
def test_a_download_is_kept_and_then_served_without_a_mirror_unless_it_is_broken(folder, tmp_path, serve):
    cache = tmp_path / "cache"
    digits = load_mnist(mirrors=[serve(folder)], cache_dir=cache)
    assert_is_the_folder(digits)
    assert digits.source == f"MNIST from the download in {cache}"
    assert_is_the_folder(load_mnist(mirrors=[], cache_dir=cache))
    (cache / f"{NAMES[0]}.gz").write_bytes(b"half a fi")
    assert_is_the_folder(load_mnist(mirrors=[serve(folder)], cache_dir=cache))


@pytest.mark.slow
@pytest.mark.usefixtures("our_checksums")
def test_a_download_with_a_wrong_checksum_is_dropped_and_the_next_mirror_serves(folder, tmp_path, serve):
    tampered = tmp_path / "tampered"
    tampered.mkdir()
    for name in NAMES:
        (tampered / f"{name}.gz").write_bytes(gzip.compress(idx(ARRAYS[name] * 0)))
    cache, bad = tmp_path / "cache", serve(tampered)
    digits = load_mnist(mirrors=[bad], cache_dir=cache)
    assert digits.source == "scikit-learn's digits, 8x8 scaled"
    assert list(cache.rglob("*")) == []
    assert_is_the_folder(load_mnist(mirrors=[bad, serve(folder)], cache_dir=cache))


# -- offline -------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent():
    """Return the URL of a host that accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    listener.close()


@pytest.fixture
def closed():
    """Return the URL of a port on which nothing listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    return f"http://127.0.0.1:{port}/"


def assert_gives_digits_in_time(mirrors: list[str], cache: Path):
    start = time.monotonic()
    digits = load_mnist(mirrors=mirrors, cache_dir=cache)
    assert time.monotonic() - start < 30  # a host that never answers would be waited for without end
    assert digits.source == "scikit-learn's digits, 8x8 scaled"


def test_hosts_that_refuse_or_never_answer_are_given_up_in_time(silent, closed, tmp_path, caplog):
    assert_gives_digits_in_time([closed, closed], tmp_path)
    with caplog.at_level(logging.WARNING):
        assert_gives_digits_in_time([silent, silent, closed], tmp_path)
    assert f"MNIST could not be downloaded: {silent} failed" in caplog.text
    assert "--data-dir" in caplog.text
    assert all(len(record.getMessage()) < 450 for record in caplog.records)


def test_a_name_that_does_not_resolve_is_given_up_within_five_seconds(tmp_path, monkeypatch):
    given_up = threading.Event()
    real = socket.getaddrinfo

    def hang(host, *args, **kwargs):
        if host == "mirror.invalid":
            given_up.wait(20)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server")
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setenv("NO_PROXY", "*")
    assert_gives_digits_in_time(["http://mirror.invalid/"], tmp_path)
    given_up.set()


def test_offline_digits_are_real_split_for_good_and_said_loudly(tmp_path, caplog):
    digits = load_mnist(mirrors=[], cache_dir=tmp_path)
    assert "Training on scikit-learn's digits instead" in caplog.text
    assert digits.train_images.shape == (1437, 28, 28)
    assert digits.test_images.shape == (360, 28, 28)
    for images, labels in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels)):
        assert images.dtype == labels.dtype == np.uint8
        assert images.max() == 255
        assert not images[:, :2].any()
        assert not images[:, :, -2:].any()
        assert np.bincount(labels).min() >= 30
    again = load_mnist(mirrors=[], cache_dir=tmp_path)
    np.testing.assert_array_equal(again.test_images, digits.test_images)
    # all of scikit-learn's, and none twice
    small = np.concatenate([digits.train_images, digits.test_images])[:, 3:27:3, 3:27:3].reshape(-1, 64)
    import sklearn.datasets  # not at the top: a second and a half that other tests need not wait

    images, _ = sklearn.datasets.load_digits(return_X_y=True)
    expected = np.rint(images * 255 / 16).astype(np.uint8)
    np.testing.assert_array_equal(np.unique(small, axis=0), np.unique(expected, axis=0))
    assert len(small) == len(expected)


# -- synthetic -----------------------------------------------------------------------------------------------------


def test_synthetic_data_has_the_shapes_and_follows_its_seed():
    one, same, other = (synthetic_mnist(seed, n_train=20, n_test=5) for seed in (1, 1, 2))
    assert one.train_images.shape == (20, 28, 28)
    assert one.test_labels.shape == (5,)
    assert one.train_labels.dtype == np.uint8
    assert one.train_labels.max() <= 9
    np.testing.assert_array_equal(one.train_images, same.train_images)
    assert (one.train_images != other.train_images).any()
