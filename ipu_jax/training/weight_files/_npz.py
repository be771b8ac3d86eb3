"""Write and read npz files, one array after the other: a zip archive in which the leaf "a/b" is the file a/b.npy.

NumPy has no bfloat16. It saves a bfloat16 array as pairs of bytes without a meaning ("V2"), and so do we. The comment
of the archive's entry contains the meaning, "dtype=bfloat16"; np.load ignores the comment. Without a comment, "V2" is
bfloat16, as `jnp.load` reads it. The archive contains a CRC-32 of each array.
"""

import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ipu_jax.training.weight_files._tensors import BadFileError, TensorInfo, byte_pieces, naming, quoted

_SUFFIX = ".npy"
_NUMBERS = "biufc"
_COMMENT = "dtype="
_DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, RuntimeError, SyntaxError)
_LIMIT = 1 << 30  # entries of at least this many bytes are written in the 64-bit form
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # the earliest date of the format: equal weights make equal files


def check_writable(name: str, info: TensorInfo) -> None:
    """Raise `ValueError` for an array that the format cannot hold."""
    if "\0" in name or len(f"{name}{_SUFFIX}".encode(errors="replace")) > 0xFFFF:
        raise ValueError(f"leaf {name[:60]!r} has a name that a zip archive cannot hold: rename it, or use safetensors")
    if np.dtype(info.dtype).kind not in _NUMBERS and _is_of_numpy(np.dtype(info.dtype)):
        raise ValueError(f"leaf {name!r} is {info.dtype}: make it an array of numbers")


def file_order(infos: Sequence[tuple[str, TensorInfo]]) -> list[int]:
    """Return the order in which arrays are written: the order of `infos`."""
    return list(range(len(infos)))


def write(file: BinaryIO, infos: Sequence[tuple[str, TensorInfo]], arrays: Iterator[np.ndarray]) -> None:
    """Write arrays, in the order of `infos`."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, info in infos:
            _write_array(archive, name, info, next(arrays))


def _write_array(archive: zipfile.ZipFile, name: str, info: TensorInfo, array: np.ndarray) -> None:
    dtype = np.dtype(info.dtype)
    entry = zipfile.ZipInfo(f"{name}{_SUFFIX}", _FIRST_DAY)
    stored = dtype
    if not _is_of_numpy(dtype):
        entry.comment = f"{_COMMENT}{dtype.name}".encode()
        stored = np.dtype((np.void, dtype.itemsize))  # not dtype.str, which NumPy cannot read for 8-bit floats
    header = {"descr": stored.str, "fortran_order": False, "shape": info.shape}
    with archive.open(entry, "w", force_zip64=array.nbytes >= _LIMIT) as file:
        np.lib.format.write_array_header_1_0(file, header)  # pyright: ignore[reportArgumentType]
        for piece in byte_pieces(array):
            file.write(piece)


def _is_of_numpy(dtype: np.dtype) -> bool:
    return dtype.isbuiltin != 2  # 2: registered by another package, here ml_dtypes


class NpzFile:
    """The arrays of an npz file, also of a file from `numpy.savez` or `savez_compressed`.

    Args:
        file: open for reading; it must stay open.
        label: its path, for error messages.

    Raises:
        BadFileError: it is not an archive of arrays.
    """

    def __init__(self, file: BinaryIO, label: str):
        self.label = label
        self.tensors: dict[str, TensorInfo] = {}
        self._entries: dict[str, zipfile.ZipInfo] = {}
        with naming(label, *_DAMAGE, MemoryError):  # Python's parser raises it at a header of many brackets
            self._archive = zipfile.ZipFile(file)
            for entry in self._archive.infolist():
                name = entry.filename.removesuffix(_SUFFIX)
                if name == entry.filename or name in self.tensors:
                    is_torch = entry.filename.endswith("/data.pkl")
                    mend = "save torch's with safetensors.torch.save_file" if is_torch else "give one by numpy.savez"
                    what = "not an array" if name == entry.filename else "there twice"
                    raise BadFileError(f"{label} is not an npz file: entry {quoted(entry.filename)} is {what}; {mend}")
                if entry.header_offset < 0:  # zipfile would pass the operating system's error on
                    raise zipfile.BadZipFile(f"{quoted(entry.filename)} lies before the file's beginning")
                with self._archive.open(entry) as member:
                    self.tensors[name] = _info(member, entry)
                self._entries[name] = entry

    def read(self, name: str) -> np.ndarray:
        """Return an array. All of it is read.

        Raises:
            BadFileError: its bytes are not the bytes that were written.
        """
        info, entry = self.tensors[name], self._entries[name]
        with naming(f"{self.label}: {name!r}", *_DAMAGE), self._archive.open(entry) as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
            if member.read(1):
                raise BadFileError(f"{self.label} is damaged: {name!r} has bytes after its array. Get it again")
        assert not isinstance(info.dtype, str), "a leaf that takes it is refused"
        return array if array.dtype == info.dtype else array.view(info.dtype)


def _info(member: Any, entry: zipfile.ZipInfo) -> TensorInfo:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, stored = read(member)
    if stored.hasobject:
        raise ValueError(f"{quoted(entry.filename)} has Python objects, not numbers")
    if math.prod(shape) * stored.itemsize > entry.file_size:
        raise ValueError(f"{quoted(entry.filename)} has {entry.file_size:,} bytes, too few for {stored}{list(shape)}")
    if stored.kind in _NUMBERS:
        return TensorInfo(shape, stored)
    if stored.kind != "V" or stored.names is not None:
        return TensorInfo(shape, str(stored))
    named = re.fullmatch(f"{_COMMENT}([a-z0-9_]+)", entry.comment.decode(errors="replace"))
    try:
        meant = jnp.dtype(named[1]) if named else np.dtype(ml_dtypes.bfloat16)
    except TypeError:
        return TensorInfo(shape, entry.comment.decode(errors="replace"))
    is_meant = meant.itemsize == stored.itemsize and not _is_of_numpy(meant)
    return TensorInfo(shape, meant if is_meant else stored.str)
