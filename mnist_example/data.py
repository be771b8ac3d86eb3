"""Load handwritten digits from the first source that is available.

    --data-dir  ->  $MNIST_DIR  ->  the download cache  ->  a public mirror  ->  scikit-learn's digits
    (IDX files, .gz or not)         (checksums)             (given up in 5 s)    (offline: small, with a warning)

A folder that the user names must work: a missing or broken file in it is an error, and the next source is not tried.
Only the network may fail. Then the program trains on the 1,797 real digits that are part of scikit-learn.

An IDX file contains a magic number (two zero bytes, the dtype, the number of dims), the dims as big-endian int32, and
the values: http://yann.lecun.com/exdb/mnist. No maintained library reads it, so a small function here does.
"""

import dataclasses
import gzip
import io
import logging
import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import pooch
import requests

from ipu_jax import cli
from mnist_example.flags import DataFlags

T = TypeVar("T")

_log = logging.getLogger(__name__)

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_MOST_DIGITS = 1_000_000  # in one file
_MOST_UNZIPPED = 1032  # bytes of a byte of a gzip file: https://www.zlib.net/zlib_tech.html
_PIECE = 1 << 20

# How long all mirrors together may take to answer. Five seconds in total are promised; the rest is for loading digits.
_ANSWER_SECONDS = 3.5
_STALL_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class MNIST:
    """Training digits and test digits.

    `*_images` are uint8 (N, 28, 28), white (255) on black; `*_labels` are uint8 (N,), 0 to 9. The arrays may be
    read-only.
    """

    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.uint8]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.uint8]
    source: str
    """The origin of the digits, as text for the user."""
    expected: float | None = None
    """The accuracy that a training run with the default flags reaches; None if there is nothing to learn."""


def described() -> MNIST:
    """Return a data set like MNIST that takes no memory: 60,000 and 10,000 black zeros."""
    zeros = lambda *shape: np.broadcast_to(np.uint8(0), shape)
    return MNIST(zeros(60_000, 28, 28), zeros(60_000), zeros(10_000, 28, 28), zeros(10_000), "no images")


def prepared(flags: DataFlags, ipus: int) -> MNIST:
    """Return the digits that the flags ask for, and make `ipus` IPUs for each replica.

    Data that may have to be downloaded is read after the IPUs are made, so that a missing platform is reported at once.
    Making the IPUs also connects the instances, and then the first instance on each host downloads the data.

    Raises:
        ValueError, OSError: a folder that the user named does not hold the digits, there are too few images for one
            update, or the IPUs cannot be made.
    """
    load = lambda: synthetic_mnist(flags.seed) if flags.synthetic_data else load_mnist(flags.data_dir)
    may_download = not (flags.synthetic_data or flags.data_dir or os.environ.get("MNIST_DIR"))
    data = None if may_download else load()
    if data is None:
        cli.start_ipus(flags.replicas, ipus)
        data = cli.load_once_per_host(load)
    if len(data.train_images) < flags.images_per_update:
        given = {"batch_size": flags.batch_size, "gradient_accumulation_count": flags.gradient_accumulation_count}
        given |= {"replicas": flags.replicas} if flags.replicas > 1 else {}
        product = " x ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(
            f"{product} takes {flags.images_per_update} images for an update, but there are {len(data.train_images)}: "
            f"lower one of the {'two' if len(given) == 2 else 'three'}"
        )
    if not may_download:
        cli.start_ipus(flags.replicas, ipus)
    return data


def load_mnist(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MIRRORS,
    cache_dir: str | os.PathLike[str] | None = None,
) -> MNIST:
    """Load MNIST from the first source that is available: see the picture in the module's docstring.

    Args:
        data_dir: a folder with the four IDX files, `train-images-idx3-ubyte.gz` and so on, with or without `.gz`.
            None: the folder that `$MNIST_DIR` names, else the download cache, a download, or scikit-learn's digits.
        mirrors: URLs of folders to download from, each ending in "/". The first one that answers is used.
        cache_dir: where downloads are kept; None: the user's cache folder.

    Raises:
        ValueError: the data dir is not a folder or lacks a file; or a file in it is not IDX, is truncated, or contains
            something other than 28x28 images or labels from 0 to 9; or there are not as many labels as images.
    """
    if data_dir is not None:
        return _load_folder(Path(data_dir), f"--data-dir {os.fspath(data_dir)}", "leave --data-dir out")
    if folder := os.environ.get("MNIST_DIR"):
        return _load_folder(Path(folder).expanduser(), f"$MNIST_DIR {folder}", "unset MNIST_DIR")
    cache = Path(cache_dir) if cache_dir is not None else Path(pooch.os_cache("ipu-jax")) / "mnist"
    failures = [] if _is_complete(cache) else _download(cache, mirrors)
    if _is_complete(cache):
        return _load_folder(cache, f"the download in {cache}", "remove that folder")
    _log.warning(
        "MNIST could not be downloaded: %s. Training on scikit-learn's digits instead: 1,797 images of 8x8, scaled to "
        "28x28. Accuracies are not MNIST's. For the real one, name a folder with its four files: --data-dir.",
        "; ".join(failures) or "no mirror was given",
    )
    return _bundled_digits()


def synthetic_mnist(seed: int, n_train: int = 60_000, n_test: int = 10_000) -> MNIST:
    """Return random pixels and labels in MNIST's shapes, to measure speed without data. They can't be learned.

    >>> digits = synthetic_mnist(seed=0, n_train=6, n_test=2)
    >>> digits.train_images.shape, digits.train_images.dtype, digits.test_labels.shape, digits.source
    ((6, 28, 28), dtype('uint8'), (2,), 'synthetic data, seed 0')
    """
    random = np.random.default_rng(seed)

    def images_and_labels(count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        return images, random.integers(0, 10, count, dtype=np.uint8)

    return MNIST(*images_and_labels(n_train), *images_and_labels(n_test), source=f"synthetic data, seed {seed}")


def _bundled_digits() -> MNIST:
    """Return scikit-learn's digits: each pixel becomes 3x3 pixels, with an empty border of 2 pixels as in MNIST."""
    # These imports take a second, and are rarely needed.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = np.pad(images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    labels = labels.astype(np.uint8)
    train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)
    source = "scikit-learn's digits, 8x8 scaled"
    return MNIST(images[train], labels[train], images[test], labels[test], source=source, expected=0.95)


def _load_folder(folder: Path, origin: str, otherwise: str) -> MNIST:
    """Return the digits of a folder. An error ends in what to do, such as `otherwise`, to download them instead."""
    try:
        return MNIST(*_arrays_of(folder, origin), source=f"MNIST from {origin}", expected=0.96)
    except ValueError as error:
        mend = f"put the four MNIST files there, or {otherwise} to download them"
        raise ValueError(f"{error}: {mend}") from error


def _arrays_of(folder: Path, origin: str) -> list[npt.NDArray[np.uint8]]:
    if not folder.is_dir():
        raise ValueError(f"{origin} is not a folder")
    paths = {name: _find(folder, name) for name in _SHA256}
    if missing := [name for name, path in paths.items() if path is None]:
        raise ValueError(f"{origin} lacks {', '.join(missing)}")
    pairs: list[tuple[Path, Path]] = []
    for split in ("train", "t10k"):
        images_path, labels_path = paths[f"{split}-images-idx3-ubyte.gz"], paths[f"{split}-labels-idx1-ubyte.gz"]
        assert images_path is not None, "every path was found above"
        assert labels_path is not None, "every path was found above"
        counts = [_read_idx(path, _count_of, item) for path, item in ((images_path, (28, 28)), (labels_path, ()))]
        if counts[0] != counts[1]:
            raise ValueError(f"{images_path} holds {counts[0]} images, {labels_path} {counts[1]} labels")
        pairs.append((images_path, labels_path))
    arrays: list[npt.NDArray[np.uint8]] = []
    for images_path, labels_path in pairs:  # the headers agree
        labels, images = _read_idx(labels_path, _array_of, ()), _read_idx(images_path, _array_of, (28, 28))
        if len(wrong := np.flatnonzero(labels > 9)):
            raise ValueError(
                f"{labels_path} holds {labels[wrong[0]]} as label number {wrong[0]}, counted from 0, and digits go to 9"
            )
        arrays += [images, labels]
    return arrays


def _find(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, folder / name.removesuffix(".gz"))
    return next((path for path in candidates if path.is_file()), None)


def _read_idx(
    path: Path, read: Callable[[BinaryIO | gzip.GzipFile, Path, tuple[int, ...], int], T], item: tuple[int, ...]
) -> T:
    """Read one IDX file of unsigned bytes, (N, *item), with `read`. It may be compressed, whatever its name is."""
    with path.open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
        most = os.fstat(file.fileno()).st_size * (_MOST_UNZIPPED if is_zipped else 1)
        file.seek(0)
        if not is_zipped:
            return read(file, path, item, most)
        try:
            with gzip.GzipFile(fileobj=file) as unzipped:
                return read(unzipped, path, item, most)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is broken or truncated, it cannot be unzipped ({error})") from error


def _count_of(file: BinaryIO | gzip.GzipFile, path: Path, item: tuple[int, ...], most: int) -> int:
    """Read the header of a file that has at most `most` bytes, and return how many digits it holds."""
    dims = 1 + len(item)
    magic, found = bytes([0, 0, 8, dims]), file.read(4)
    if found != magic:
        raise ValueError(f"{path} starts with {found.hex() or 'nothing'}, not with {magic.hex()}")
    header = file.read(4 * dims)
    if len(header) < 4 * dims:
        raise ValueError(f"{path} is truncated within its header, after {4 + len(header)} bytes")
    shape = tuple(map(int, np.frombuffer(header, ">u4")))
    if shape[1:] != item:
        found, wanted = ("x".join(map(str, sizes)) for sizes in (shape[1:], item))
        raise ValueError(f"{path} holds images of {found}, not {wanted}")
    if not 0 < shape[0] <= _MOST_DIGITS:
        holds = f"{shape[0]:,}, more than {_MOST_DIGITS:,}" if shape[0] else f"nothing, its shape is {shape}"
        raise ValueError(f"{path} holds {holds}")
    if (has := most - 4 - 4 * dims) < math.prod(shape):
        at_most = "" if isinstance(file, io.BufferedReader) else "at most "
        raise ValueError(
            f"{path} is truncated: shape {shape} takes {math.prod(shape)} bytes, not {at_most}{max(0, has)}"
        )
    return shape[0]


def _array_of(file: BinaryIO | gzip.GzipFile, path: Path, item: tuple[int, ...], most: int) -> npt.NDArray[np.uint8]:
    """Read a file, and at most one byte more than its header announces: it can unzip to a thousand times its size."""
    shape = (_count_of(file, path, item, most), *item)
    values, have = np.empty(math.prod(shape), np.uint8), 0  # the memory is taken only as far as it is written
    while have < len(values):
        piece = file.read(min(_PIECE, len(values) - have))
        if not piece:
            raise ValueError(f"{path} is truncated: shape {shape} takes {len(values)} bytes, not {have}")
        values[have : have + len(piece)] = np.frombuffer(piece, np.uint8)
        have += len(piece)
    if file.read(1):
        raise ValueError(f"{path} is too long: shape {shape} takes {len(values)} bytes, and more follow")
    return values.reshape(shape)


def _is_complete(cache: Path) -> bool:
    return all(
        (cache / name).is_file() and pooch.file_hash(str(cache / name)) == sha256 for name, sha256 in _SHA256.items()
    )


def _download(cache: Path, mirrors: Sequence[str]) -> list[str]:
    """Fetch missing files of the cache from the first mirror that works; return a text for each mirror that failed.

    pooch checks a file before it moves it into the cache, so the cache never contains a broken download. A thread does
    the download, since no timeout covers name resolution, which can hang for a long time without a network.
    """
    failures: list[str] = []
    has_begun, has_ended = threading.Event(), threading.Event()

    def fetch() -> None:
        for mirror in mirrors:
            files = pooch.create(path=cache, base_url=mirror, registry=_SHA256)
            try:
                has_it = requests.head(
                    mirror + next(iter(_SHA256)), timeout=_ANSWER_SECONDS / len(mirrors), allow_redirects=True
                )
                has_it.raise_for_status()
                has_begun.set()
                for name in _SHA256:
                    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=_STALL_SECONDS)
                    files.fetch(name, downloader=downloader)  # pyright: ignore[reportArgumentType] (pooch's mismatch)
                break
            except (requests.RequestException, OSError, ValueError) as error:
                is_long = isinstance(error, (requests.ConnectionError, requests.Timeout))  # three lines of urllib3
                failures.append(f"{mirror} failed ({type(error).__name__ if is_long else error})")
        has_ended.set()

    threading.Thread(target=fetch, daemon=True).start()
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until and not (has_begun.is_set() or has_ended.is_set()):
        has_ended.wait(0.02)
    if not has_begun.is_set() and not has_ended.is_set():
        return [*failures, f"no good answer within {_ANSWER_SECONDS:g} s from {' or '.join(mirrors)}"]
    has_ended.wait()
    return failures
