"""Test where the digits come from, and the errors for broken files. No test needs the network."""

import functools
import gzip
import http.server
import logging
import os
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

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
REAL = os.environ.get("MNIST_DIR", "")
MEND = "put the four MNIST files there again, or leave the data dir out to download them"
FILES = synthetic_mnist(seed=0, n_train=7, n_test=3)
ARRAYS = dict(zip(NAMES, (FILES.train_images, FILES.train_labels, FILES.test_images, FILES.test_labels), strict=True))


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a data dir with seven training digits and three test digits, zipped."""
    data = tmp_path / "data"
    data.mkdir()
    for name, array in ARRAYS.items():
        (data / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return data


@pytest.fixture(autouse=True)
def no_data_but_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MNIST_DIR", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def assert_is_the_folder(digits: mnist_example.data.MNIST):
    loaded = (digits.train_images, digits.train_labels, digits.test_images, digits.test_labels)
    for array, expected in zip(loaded, ARRAYS.values(), strict=True):
        assert array.dtype == np.uint8
        np.testing.assert_array_equal(array, expected)


# -- a folder ------------------------------------------------------------------------------------------------------


def test_a_folder_of_zipped_files_loads(folder):
    digits = load_mnist(folder)
    assert_is_the_folder(digits)
    assert digits.source == f"MNIST from --data-dir {folder}"


def test_a_folder_of_unzipped_files_loads(folder):
    for name in NAMES:
        (folder / f"{name}.gz").unlink()
        (folder / name).write_bytes(idx(ARRAYS[name]))
    assert_is_the_folder(load_mnist(str(folder)))


def test_a_file_that_a_browser_unzipped_without_renaming_it_loads(folder):
    (folder / f"{NAMES[0]}.gz").write_bytes(idx(ARRAYS[NAMES[0]]))
    assert_is_the_folder(load_mnist(folder))


def test_the_environment_names_a_folder_and_the_argument_wins(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MNIST_DIR", str(folder))
    digits = load_mnist()
    assert_is_the_folder(digits)
    assert digits.source == f"MNIST from $MNIST_DIR {folder}"
    with pytest.raises(ValueError, match=r"^--data-dir .*elsewhere is not a folder"):
        load_mnist(tmp_path / "elsewhere")


def test_a_data_dir_that_is_none_is_an_error(folder, monkeypatch):
    file = folder / f"{NAMES[0]}.gz"
    with pytest.raises(ValueError, match="is not a folder") as caught:
        load_mnist(file)
    assert str(caught.value) == f"--data-dir {file} is not a folder: {MEND}"
    monkeypatch.setenv("MNIST_DIR", str(folder / "none"))
    with pytest.raises(ValueError, match=r"^\$MNIST_DIR .*none is not a folder"):
        load_mnist()


def test_missing_files_are_named(folder):
    (folder / f"{NAMES[0]}.gz").unlink()
    (folder / f"{NAMES[3]}.gz").unlink()
    with pytest.raises(ValueError, match="lacks") as caught:
        load_mnist(folder)
    assert str(caught.value) == f"--data-dir {folder} lacks {NAMES[0]}.gz, {NAMES[3]}.gz: {MEND}"


@pytest.mark.parametrize(
    ("which", "content", "wrong"),
    [
        (0, b"", "starts with nothing, not with 00000803"),
        (0, b"\0\0\x08", "starts with 000008, not with 00000803"),
        (0, b"<html>not found</html>", "starts with 3c68746d, not with 00000803"),
        (0, idx(ARRAYS[NAMES[1]]), "starts with 00000801, not with 00000803"),
        (1, idx(ARRAYS[NAMES[0]]), "starts with 00000803, not with 00000801"),
        (0, b"\0\0\x08\x03\0\0", "is truncated within its header, after 6 bytes"),
        (0, idx(ARRAYS[NAMES[0]])[:-1], "is truncated: shape (7, 28, 28) takes 5488 bytes, not 5487"),
        (0, idx(ARRAYS[NAMES[0]]) + b"!", "is too long: shape (7, 28, 28) takes 5488 bytes, and more follow"),
        (0, struct.pack(">4B3I", 0, 0, 8, 3, 1_000_001, 28, 28), "holds 1,000,001, more than 1,000,000"),
        (0, struct.pack(">4B3I", 0, 0, 8, 3, 7, 1 << 20, 28), "holds images of 1048576x28, not 28x28"),
        (3, struct.pack(">4BI", 0, 0, 8, 1, (1 << 32) - 1), "holds 4,294,967,295, more than 1,000,000"),
        (0, idx(np.zeros((7, 8, 8), np.uint8)), "holds images of 8x8, not 28x28"),
        (0, idx(np.zeros((0, 28, 28), np.uint8)), "holds nothing, its shape is (0, 28, 28)"),
        (1, idx(np.full(7, 12, np.uint8)), "holds 12 as label number 0, counted from 0, and digits go to 9"),
        (
            1,
            idx(np.array([0, 9, 1, 2, 3, 10, 255], np.uint8)),
            "holds 10 as label number 5, counted from 0, and digits go to 9",
        ),
        (3, idx(np.array([9, 0, 255], np.uint8)), "holds 255 as label number 2, counted from 0, and digits go to 9"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_broken_file_is_named_with_what_is_wrong(folder, which, content, wrong, zipped):
    path = folder / f"{NAMES[which]}.gz"
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(ValueError, match=r"-ubyte\.gz") as caught:
        load_mnist(folder)
    assert str(caught.value) == f"{path} {wrong}: {MEND}"


def test_no_more_is_unzipped_than_the_header_says(folder):
    path = folder / f"{NAMES[0]}.gz"
    zeros = gzip.compress(bytes(1 << 25))
    path.write_bytes(gzip.compress(idx(ARRAYS[NAMES[0]])) + 32 * zeros)  # 1 GB of 1 MB
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"is too long: shape \(7, 28, 28\) takes 5488 bytes, and more follow"):
        load_mnist(folder)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


CLAIMS = struct.pack(">4B3I", 0, 0, 8, 3, 900_000, 28, 28)

LARGE = np.random.default_rng(0).bytes(1 << 20)


@pytest.mark.parametrize(
    ("images", "labels", "wrong"),
    [
        (CLAIMS, 900_000, r"is truncated: shape \(900000, 28, 28\) takes 705600000 bytes, not 0:"),
        (gzip.compress(CLAIMS), 900_000, r"is truncated: shape .* takes 705600000 bytes, not at most \d{5}:"),
        (gzip.compress(CLAIMS + bytes(1 << 27)), 900_000, r"is truncated: .* bytes, not at most 13\d{7}:"),
        (gzip.compress(CLAIMS) + LARGE, 7, r"holds 900000 images, .* 7 labels:"),
        (gzip.compress(CLAIMS) + LARGE, 900_000, r"is broken or truncated, it cannot be unzipped"),
    ],
    ids=["a header", "a zipped header", "zipped zeros", "few labels", "other bytes"],
)
def test_many_claimed_images_are_refused_before_they_are_read(folder, images, labels, wrong):
    path = folder / f"{NAMES[0]}.gz"
    path.write_bytes(images)
    (folder / f"{NAMES[1]}.gz").write_bytes(gzip.compress(idx(np.zeros(labels, np.uint8))))
    begun = time.process_time()
    tracemalloc.start()
    with pytest.raises(ValueError, match=wrong):
        load_mnist(folder)
    written = tracemalloc.get_traced_memory()[1] - (705_600_000 if "broken" in wrong else 0)  # never touched
    tracemalloc.stop()
    assert written < 1 << 23
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("keep", [5, 30, 200])
def test_a_truncated_archive_is_named(folder, keep):
    path = folder / f"{NAMES[2]}.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"is broken or truncated, it cannot be unzipped") as caught:
        load_mnist(folder)
    assert str(caught.value).startswith(f"{path} is broken or truncated")


def test_a_damaged_archive_is_named(folder):
    path = folder / f"{NAMES[2]}.gz"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"is broken or truncated, it cannot be unzipped"):
        load_mnist(folder)


def test_counts_that_differ_name_both_files(folder):
    images, labels = folder / f"{NAMES[0]}.gz", folder / f"{NAMES[1]}.gz"
    labels.write_bytes(idx(np.zeros(6, np.uint8)))
    with pytest.raises(ValueError, match="7 images") as caught:
        load_mnist(folder)
    assert str(caught.value) == f"{images} holds 7 images, {labels} 6 labels: {MEND}"


@pytest.mark.skipif(not REAL, reason="MNIST_DIR names no folder with the real MNIST")
def test_the_real_mnist_loads(monkeypatch):
    monkeypatch.setenv("MNIST_DIR", REAL)
    digits = load_mnist()
    assert digits.train_images.shape == (60_000, 28, 28)
    assert digits.test_images.shape == (10_000, 28, 28)
    np.testing.assert_array_equal(digits.train_labels[:8], [5, 0, 4, 1, 9, 2, 1, 3])
    np.testing.assert_array_equal(
        np.bincount(digits.test_labels), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    )
    assert digits.train_images.mean() == pytest.approx(33.318, abs=1e-3)


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
def test_a_download_is_kept_and_then_served_without_a_mirror(folder, tmp_path, serve):
    cache = tmp_path / "cache"
    digits = load_mnist(mirrors=[serve(folder)], cache_dir=cache)
    assert_is_the_folder(digits)
    assert digits.source == f"MNIST from the download in {cache}"
    assert_is_the_folder(load_mnist(mirrors=[], cache_dir=cache))


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


@pytest.mark.usefixtures("our_checksums")
def test_a_broken_file_in_the_cache_is_fetched_again(folder, tmp_path, serve):
    cache = tmp_path / "cache"
    load_mnist(mirrors=[serve(folder)], cache_dir=cache)
    (cache / f"{NAMES[0]}.gz").write_bytes(b"half a fi")
    assert_is_the_folder(load_mnist(mirrors=[serve(folder)], cache_dir=cache))


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


def assert_gives_digits_in_time(mirrors: list[str], cache: Path, seconds: float = 5.0):
    start = time.monotonic()
    digits = load_mnist(mirrors=mirrors, cache_dir=cache)
    assert time.monotonic() - start < seconds
    assert digits.source == "scikit-learn's digits, 8x8 scaled"


def test_hosts_that_never_answer_are_given_up_within_five_seconds(silent, closed, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert_gives_digits_in_time([silent, silent, closed], tmp_path)
    assert f"MNIST could not be downloaded: {silent} failed" in caplog.text
    assert "--data-dir" in caplog.text


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


def test_refused_connections_are_given_up_at_once(closed, tmp_path):
    assert_gives_digits_in_time([closed, closed], tmp_path, seconds=2.0)


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


def test_offline_digits_are_all_of_scikit_learns_and_none_twice(tmp_path):
    digits = load_mnist(mirrors=[], cache_dir=tmp_path)
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
