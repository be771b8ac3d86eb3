"""Write and read safetensors files, one array after the other.

    8 bytes          length of the header, little-endian
    the header       JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {...}}
    the arrays       little-endian, in C order, without gaps; offsets count from here

The header contains the place of each array, so shapes must be known before the first byte is written, but not values.
"__metadata__" contains only texts. Ours has one entry, the CRC-32 of each array, to recognise damage. It is filled in
at the end. Source: the format's own page, https://huggingface.co/docs/safetensors.
"""

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ipu_jax.base.annotations import Json
from ipu_jax.training.weight_files._tensors import BadFileError, TensorInfo, byte_pieces, naming, quoted

_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "UI" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "C64": np.dtype(np.complex64),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_CHECKSUMS = "ipu_jax.crc32"
_MOST_DIMS = 64  # NumPy's limit
_MOST_ELEMENTS = 1 << 60
_LARGEST_HEADER = 100_000_000  # the safetensors library's limit: a damaged length must not be allocated


def check_writable(name: str, info: TensorInfo) -> None:
    """Raise `ValueError` for an array that the format cannot hold."""
    if name == _METADATA:
        raise ValueError(
            f"leaf {name!r} has the one name that safetensors keeps for itself: rename it, or export an npz"
        )
    if info.dtype not in _CODES:
        raise ValueError(
            f"leaf {name!r} is {info.dtype}, which safetensors does not have: export an npz, or convert it"
        )


def file_order(infos: Sequence[tuple[str, TensorInfo]]) -> list[int]:
    """Return the order in which arrays are written: large elements first, so that each is aligned to its own size."""
    return sorted(range(len(infos)), key=lambda i: -np.dtype(infos[i][1].dtype).itemsize)


def write(file: BinaryIO, infos: Sequence[tuple[str, TensorInfo]], arrays: Iterator[np.ndarray]) -> None:
    """Write arrays in the order of `infos`, which is the order of `file_order`."""
    checksums = {name: 0 for name, _ in infos}
    file.write(_header(infos, checksums))
    for name, info in infos:
        checksums[name] = _write_array(file, info, next(arrays))
    file.seek(0)
    file.write(_header(infos, checksums))


def _write_array(file: BinaryIO, info: TensorInfo, array: np.ndarray) -> int:
    assert (array.shape, array.dtype) == (info.shape, info.dtype), "the header would be wrong"
    checksum = 0
    for piece in byte_pieces(array):
        checksum = zlib.crc32(piece, checksum)
        file.write(piece)
    return checksum


def _header(infos: Sequence[tuple[str, TensorInfo]], checksums: dict[str, int]) -> bytes:
    # each checksum has 8 digits, so that the header has the same length at the end as at the beginning
    texts = {name: f"{checksum:08x}" for name, checksum in checksums.items()}
    header: dict[str, Json] = {_METADATA: {_CHECKSUMS: json.dumps(texts)}}
    start = 0
    for name, info in infos:
        dtype = np.dtype(info.dtype)
        stop = start + math.prod(info.shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(info.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the arrays begin at a multiple of 8, as in the library
    return struct.pack("<Q", len(text)) + text


class SafetensorsFile:
    """The arrays of a safetensors file from any program.

    Args:
        file: open for reading; it must stay open.
        label: its path, for error messages.

    Raises:
        BadFileError: the file violates the format.
    """

    def __init__(self, file: BinaryIO, label: str):
        self.label, self._file = label, file
        header, self._start = _read_header(file, label)
        size = os.fstat(file.fileno()).st_size - self._start
        metadata = header.pop(_METADATA, None)
        self._offsets: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        ranges = []
        for name, entry in header.items():
            with naming(f"{label}: the header's entry of {quoted(name)}", KeyError, TypeError, ValueError):
                shape, (start, stop) = _shape(entry["shape"]), map(_natural, entry["data_offsets"])
                dtype = _DTYPES.get(entry["dtype"], str(entry["dtype"]))
                if not isinstance(dtype, str) and stop - start != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{stop - start} bytes are not a {TensorInfo(shape, dtype)}")
            self.tensors[name], self._offsets[name] = TensorInfo(shape, dtype), start
            ranges.append((start, stop))
        end = 0
        for start, stop in sorted(ranges):
            if start != end or stop < start:
                raise BadFileError(f"{label} is damaged: its arrays overlap or leave gaps. Export or download it again")
            end = stop
        if end != size:
            how = "is cut short" if size < end else "has bytes after its arrays"
            raise BadFileError(f"{label} {how}: {size:,} bytes of arrays, where its header says {end:,}. Get it again")
        with naming(f"{label}: its metadata", TypeError, ValueError, AttributeError, RecursionError):
            texts = json.loads((metadata or {}).get(_CHECKSUMS, "{}"))
            self._checksums = {name: int(texts[name], 16) for name in texts}

    def read(self, name: str) -> np.ndarray:
        """Return an array, mapped into memory: unused parts are read only if the file has checksums, and then once.

        Raises:
            BadFileError: its bytes are not the bytes that were written.
        """
        info, start = self.tensors[name], self._start + self._offsets[name]
        assert not isinstance(info.dtype, str), "a leaf that takes it is refused"
        dtype = info.dtype
        size = math.prod(info.shape) * dtype.itemsize
        self._check(name, start, size)
        if size == 0:
            return np.empty(info.shape, dtype)
        page = start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file.fileno(), size + page, access=mmap.ACCESS_READ, offset=start - page)
        return np.frombuffer(mapped, np.uint8, size, page).view(dtype).reshape(info.shape)

    def _check(self, name: str, start: int, size: int) -> None:
        if name not in self._checksums:
            return
        expected, checksum, buffer = self._checksums.pop(name), 0, bytearray(1 << 20)  # popped: checked only once
        self._file.seek(start)
        while size > 0:
            count = self._file.readinto(memoryview(buffer)[: min(size, len(buffer))])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise BadFileError(f"{self.label} was cut short while it was read. Get it again")
            checksum, size = zlib.crc32(memoryview(buffer)[:count], checksum), size - count
        if checksum != expected:
            raise BadFileError(
                f"{self.label} is damaged: the bytes of {quoted(name)} are not those written (CRC-32 {checksum:08x}, "
                f"not {expected:08x}). Export or download it again; if a program changed it on purpose, have it "
                f"leave out the metadata entry {_CHECKSUMS!r}"
            )


def _read_header(file: BinaryIO, label: str) -> tuple[dict[str, Json], int]:
    """Return the header, and where the arrays begin."""
    first, size = file.read(8), os.fstat(file.fileno()).st_size
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
        raise BadFileError(
            f"{label} is not a safetensors or npz file, or is cut short: it has {size:,} bytes, whose first 8 say that "
            f"a header of {length:,} follows. Get it again, or save it with safetensors or numpy.savez"
        )
    with naming(f"{label}: its header", ValueError, RecursionError):
        header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError(f"it is {type(header).__name__}, not an object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _shape(sizes: list[Any]) -> tuple[int, ...]:
    if len(sizes) > _MOST_DIMS:  # multiplying many large sizes takes long
        raise ValueError(f"{len(sizes):,} dims are more than {_MOST_DIMS}")
    shape = tuple(map(_natural, sizes))
    if math.prod(max(size, 1) for size in shape) > _MOST_ELEMENTS:
        raise ValueError("its shape is too large")
    return shape


def _natural(value: Json) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.60} is not a size")
    return value
