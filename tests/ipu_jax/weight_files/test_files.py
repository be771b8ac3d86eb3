"""Test that a file is whole or not there at all, and that damaged ones are refused by name."""

import contextlib
import errno
import io
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from ipu_jax import Pipeline, Saved, Stage, export_weights, import_weights, replacing
from ipu_jax.weight_files import _safetensors

FORMATS = ("safetensors", "npz")
OLD, NEW = {"w": np.zeros(3, np.float32)}, {"w": np.arange(300_000, dtype=np.float32)}


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return tmp_path / f"weights.{request.param}"


def assert_is_old(path: Path) -> None:
    np.testing.assert_array_equal(import_weights(path, OLD)["w"], OLD["w"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


# writing


def test_a_new_file_replaces_the_old_one_and_leaves_nothing_beside_it(path):
    export_weights(path, OLD)
    path.chmod(0o640)
    export_weights(path, NEW)
    np.testing.assert_array_equal(import_weights(str(path), NEW)["w"], NEW["w"])
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_new_file(path):
    before = os.umask(0o027)
    try:
        export_weights(path, OLD)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(path):
    (path.parent / "far").mkdir()
    target = path.parent / "far" / path.name
    export_weights(target, OLD)
    path.symlink_to(target)
    export_weights(path, NEW)
    assert path.is_symlink()
    assert import_weights(target, NEW)["w"].size == 300_000


def test_a_reader_of_the_old_file_goes_on_with_it(path):
    export_weights(path, OLD)
    with path.open("rb") as file:
        export_weights(path, NEW)
        assert len(file.read()) < 1000


def test_the_file_reaches_the_disk_before_it_gets_its_name(path, monkeypatch):
    done = []
    monkeypatch.setattr(
        replacing.os, "fsync", lambda descriptor: done.append(("fsync", os.path.isdir(f"/proc/self/fd/{descriptor}")))
    )
    rename = os.replace
    monkeypatch.setattr(replacing.os, "replace", lambda *names: (done.append("rename"), rename(*names)))
    export_weights(path, OLD)
    assert done == [("fsync", False), "rename", ("fsync", True)]


@pytest.mark.parametrize("call", ["open", "write", "flush", "fsync", "replace"])
def test_whatever_fails_the_old_file_stays(path, monkeypatch, call):
    export_weights(path, OLD)

    def fails(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Failing:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return fails if name == call else getattr(self._file, name)

    if call in ("fsync", "replace"):
        monkeypatch.setattr(replacing.os, call, fails)
    else:
        opened = Path.open

        @contextlib.contextmanager
        def failing(self, mode):
            if call == "open":
                fails()
            with opened(self, mode) as file:
                yield Failing(file)

        monkeypatch.setattr(replacing.Path, "open", failing)
    with pytest.raises(
        OSError, match=r"No space left on device: could not write it, the file that was there is unch"
    ) as error:
        export_weights(path, NEW)
    monkeypatch.undo()
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert_is_old(path)


def test_an_interrupted_export_leaves_the_old_file(path, monkeypatch):
    export_weights(path, OLD)

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(replacing.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_weights(path, NEW)
    monkeypatch.undo()
    assert_is_old(path)


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_the_old_file(path):
    """The kernel itself refuses the bytes behind a limit, as a full disk does."""
    export_weights(path, OLD)
    code = f"""
import resource, signal
import numpy as np
from ipu_jax import export_weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
try:
    export_weights({str(path)!r}, {{"w": np.ones(300_000, np.float32)}})
except OSError as error:
    print(error.errno, error.filename)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (f"{errno.EFBIG} {path}", "")
    assert_is_old(path)


def test_a_full_file_system_leaves_the_old_file(path):
    folder = path.parent / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        small = folder / path.name
        export_weights(small, OLD)
        with pytest.raises(
            OSError, match="No space left on device: could not write it, the file that was there is unchanged"
        ):
            export_weights(small, NEW)
        assert_is_old(small)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_folder_that_takes_no_files_is_named(tmp_path):
    for path in (tmp_path / "none" / "w.npz", Path("/proc/w.npz")):
        with pytest.raises(OSError, match=f"could not write it, no file was left there: '{path}'"):
            export_weights(path, OLD)
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        export_weights(folder, OLD)
    device = tmp_path / "device.npz"
    device.symlink_to("/dev/full")
    with pytest.raises(OSError, match="Is no plain file"):
        export_weights(device, OLD)


# what cannot be exported


@pytest.mark.parametrize("name", ["w", "w.pt", "w.npy", ".npz", "w.safetensors.gz"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"has the suffix '.*': give one of .safetensors, .npz"):
        export_weights(tmp_path / name, OLD)


@pytest.mark.parametrize(
    ("suffix", "tree", "message"),
    [
        ("npz", {"w": 3.0}, "leaf 'w' is 3.0, which is no array"),
        ("npz", {"w": "text"}, "leaf 'w' is 'text', which is no array"),
        ("npz", {"w": np.array(["text"])}, "leaf 'w' is <U4: make it an array of numbers"),
        ("npz", {"w": np.array([None])}, "leaf 'w' is object: make it an array of numbers"),
        ("npz", {"w\0": np.ones(1)}, "has a name that a zip archive cannot hold"),
        ("npz", {"w" * 70_000: np.ones(1)}, "has a name that a zip archive cannot hold"),
        ("safetensors", {"w": np.array(["text"])}, "leaf 'w' is <U4, which safetensors does not have"),
        ("safetensors", {"w": np.ones(1, complex)}, "leaf 'w' is complex128, which safetensors does not have"),
        ("safetensors", {"__metadata__": np.ones(1)}, "leaf '__metadata__' has the one name that safetensors keeps"),
    ],
)
def test_what_a_format_does_not_hold_is_refused_before_writing(tmp_path, suffix, tree, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        export_weights(tmp_path / f"w.{suffix}", tree)
    assert not list(tmp_path.iterdir())


def test_wrong_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="leaf 'k' is key<fry>, which no file holds"):
        export_weights(tmp_path / "w.npz", {"k": jax.random.key(0)})
    with pytest.raises(ValueError, match="average=True needs the average of a training"):
        export_weights(tmp_path / "w.npz", OLD, average=True)
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ValueError, match="weights: an earlier call reused the buffers"):
        export_weights(tmp_path / "w.npz", {"w": gone})
    with pytest.raises(
        ValueError, match=r"weights has .*, which has no values: give arrays, and export outside of jax.jit"
    ):
        jax.jit(lambda tree: export_weights(tmp_path / "w.npz", tree))({"w": jnp.ones(3)})
    shapes = Pipeline([Stage(lambda p, x, mb: x, params="a", ipu=0)]).shard_shapes({"a": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="weights has ShapeDtypeStruct"):
        export_weights(tmp_path / "w.npz", shapes)
    unplaced = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype), shapes)
    with pytest.raises(ValueError, match=r"says not where it is: give what pipeline.shard_shapes"):
        import_weights({"a": np.ones(3, np.float32)}, unplaced)
    assert not list(tmp_path.iterdir())


# damaged files


def saved(path: Path) -> tuple[dict, bytes]:
    tree = {"a": np.arange(50, dtype=np.float32), "b": {"c": np.arange(7, dtype=np.int16)}}
    export_weights(path, tree)
    return tree, path.read_bytes()


def test_a_file_cut_short_anywhere_is_refused_by_name(path):
    tree, data = saved(path)
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            import_weights(path, tree)


def test_a_changed_byte_is_refused_by_name_or_changes_nothing(path):
    tree, data = saved(path)
    messages = []
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            found = import_weights(path, tree)
        except ValueError as error:
            messages.append(str(error))
        else:
            np.testing.assert_array_equal(found["a"], tree["a"])
            np.testing.assert_array_equal(found["b"]["c"], tree["b"]["c"])
    assert len(messages) > len(data) // 2
    assert all(str(path) in message for message in messages)


def test_a_changed_array_is_named(path):
    tree, data = saved(path)
    at = data.index(tree["a"].tobytes()) + 20
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(ValueError, match=rf"{path}.*('a'.*CRC-32|Bad CRC-32 for file 'a.npy')"):
        import_weights(path, tree)
    if path.suffix == ".safetensors":  # an npz's entry as small as this is read with its header
        assert import_weights(path, {"b": tree["b"]}, ignore=["a"])["b"]["c"][6] == 6


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"text, not weights", b"\xff" * 64, os.urandom(300)])
def test_what_is_no_file_of_weights_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is no safetensors or npz file"):
        import_weights(path, OLD)


def header_of(entries) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (b"[]", "its header is damaged: it is list, not an object"),
        (b"{nonsense", "its header is damaged"),
        (b"[" * 100_000, "its header is damaged"),
        (b'{"w":1,"w":2}', "its header is damaged: a name stands in it twice"),
        (b'{"\xff":1}', "its header is damaged"),
        ({"w": 3}, "entry of 'w' is damaged"),
        ({"w": {**W, "shape": [3]}}, "entry of 'w' is damaged: 8 bytes are no float32[3]"),
        ({"w": {**W, "shape": [-2]}}, "entry of 'w' is damaged: -2 is no size"),
        ({"w": {**W, "shape": [True, 2]}}, "entry of 'w' is damaged: True is no size"),
        ({"w": {**W, "shape": [1 << 62, 4]}}, "entry of 'w' is damaged"),
        ({"w": {**W, "shape": [1 << 40] * 60_000}}, "entry of 'w' is damaged: 60,000 dims are more than 64"),
        ({"w": {**W, "shape": [0, 1 << 40, 1 << 40]}}, "entry of 'w' is damaged: its shape is too large"),
        ({"w": {**W, "shape": "11"}}, "entry of 'w' is damaged: '1' is no size"),
        ({"w": {**W, "data_offsets": [0]}}, "entry of 'w' is damaged"),
        ({"w": {**W, "data_offsets": [8, 16]}}, "its arrays overlap or leave gaps"),
        ({"w": W, "v": W}, "its arrays overlap or leave gaps"),
        (
            {"w": {**W, "shape": [4], "data_offsets": [0, 16]}},
            "is cut short: 8 bytes of arrays, where its header says 16",
        ),
        ({"w": {**W, "shape": [1], "data_offsets": [0, 4]}}, "has bytes behind its arrays"),
        ({"w": W, "__metadata__": 3}, "its metadata is damaged"),
        ({"w": W, "__metadata__": {"ipu_jax.crc32": "nonsense"}}, "its metadata is damaged"),
        ({"w": W, "__metadata__": {"ipu_jax.crc32": '{"w": "zz"}'}}, "its metadata is damaged"),
        ({"w": W, "__metadata__": {"ipu_jax.crc32": "[" * 100_000}}, "its metadata is damaged"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, entries, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(header_of(entries) + bytes(8))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*{re.escape(message)}"):
        import_weights(path, {"w": np.ones(2, np.float32)})


def npz_of(header: dict, values: bytes, comment: str) -> bytes:
    array, file = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"fortran_order": False, "shape": (2,), **header})
    with zipfile.ZipFile(file, "w") as archive:
        entry = zipfile.ZipInfo("w.npy")
        entry.comment = comment.encode()
        archive.writestr(entry, array.getvalue() + values)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        *(
            (header_of({"w": {"dtype": text, "shape": [2], "data_offsets": [0, 16]}}) + bytes(16), text)
            for text in ("V8", "float64", "O", "<f8", "F8", "F4", "f64", "F8_E8M0", "M8[s]")
        ),
        *(
            (npz_of({"descr": "|V8"}, b"A" * 16, f"dtype={text}"), "|V8")
            for text in ("object", "datetime64", "float64", "int4")
        ),
        (npz_of({"descr": "|V8"}, b"A" * 16, "dtype=unheard_of"), "dtype=unheard_of"),
        (npz_of({"descr": "<M8[s]"}, bytes(16), ""), "datetime64[s]"),
        (npz_of({"descr": "<U2"}, bytes(16), ""), "<U2"),
    ],
)
def test_an_array_of_an_unknown_dtype_is_refused_by_name_unless_no_leaf_takes_it(tmp_path, content, dtype):
    path = tmp_path / "w"
    path.write_bytes(content)
    read = list[np.ndarray]()
    seen = Saved("w").apply(lambda array: read.append(array) or array)
    for taken in (Saved("w"), Saved("w").astype("float64"), seen):
        message = f"dtype: leaf 'w' is float32[2], and the array {dtype}[2]"
        with pytest.raises(ValueError, match=rf"(?s)1 problem:.*{re.escape(message)}.*, which has no meaning here"):
            import_weights(path, {"w": np.ones(2, np.float32)}, mapping={"w": taken}, cast=True)
    assert read == []
    assert import_weights(path, {}, ignore="w") == {}


def test_a_header_of_many_brackets_is_refused(tmp_path):
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"-" * 9000 + b"1, }\n"
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", content)
    with pytest.raises(ValueError, match=r"w.npz is damaged: "):
        import_weights(tmp_path / "w.npz", {"w": np.ones(2, np.float32)})


def test_a_huge_header_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_safetensors, "_LARGEST_HEADER", 100)
    save_file({f"w{k}": np.ones(1, np.float32) for k in range(9)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="is no safetensors or npz file, or is cut short"):
        import_weights(tmp_path / "w.safetensors", OLD)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"archive/data.pkl": b"", "archive/data/0": b""},
            "its entry 'archive/data.pkl' is no array; save torch's with",
        ),
        ({"readme.txt": b"words"}, "its entry 'readme.txt' is no array; give one by numpy.savez"),
        ({"w.npy": b"words"}, "is damaged"),
        ({"w.npy": b"\x93NUMPY\x01\x00"}, "is damaged"),
    ],
)
def test_an_archive_of_something_else_is_refused(tmp_path, entries, message):
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        import_weights(path, OLD)


def test_bytes_behind_an_array_are_damage(tmp_path):
    np.save(tmp_path / "w.npy", OLD["w"])
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", (tmp_path / "w.npy").read_bytes() + b"more")
    with pytest.raises(ValueError, match=r"w.npz is damaged: 'w' has bytes behind its array"):
        import_weights(tmp_path / "w.npz", OLD)


def test_pickles_are_never_opened(tmp_path):
    np.savez(tmp_path / "w.npz", w=np.array([{"an": "object"}], object))
    with pytest.raises(ValueError, match=r"w.npz is damaged: 'w.npy' has Python objects"):
        import_weights(tmp_path / "w.npz", OLD)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        import_weights(tmp_path / "none.npz", OLD)
