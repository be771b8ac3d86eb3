"""Test that a file is whole or not there at all, and that damaged ones are refused by name."""

import contextlib
import errno
import os
import re
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ipu_jax.base import opening
from ipu_jax.io import export_weights, import_weights

FORMATS = ("safetensors", "npz")
NO_SPACE = "No space left on device: could not write it, the file that was there is unchanged"
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
        opening.os, "fsync", lambda descriptor: done.append(("fsync", os.path.isdir(f"/proc/self/fd/{descriptor}")))
    )
    rename = os.replace
    monkeypatch.setattr(opening.os, "replace", lambda *names: (done.append("rename"), rename(*names)))
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
        monkeypatch.setattr(opening.os, call, fails)
    else:
        opened = Path.open

        @contextlib.contextmanager
        def failing(self, mode):
            if call == "open":
                fails()
            with opened(self, mode) as file:
                yield Failing(file)

        monkeypatch.setattr(opening.Path, "open", failing)
    with pytest.raises(OSError, match=NO_SPACE) as error:
        export_weights(path, NEW)
    monkeypatch.undo()
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert_is_old(path)


def test_an_interrupted_export_leaves_the_old_file(path, monkeypatch):
    export_weights(path, OLD)

    def interrupted(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(opening.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_weights(path, NEW)
    monkeypatch.undo()
    assert_is_old(path)


def test_a_full_file_system_leaves_the_old_file(path):
    folder = path.parent / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        small = folder / path.name
        export_weights(small, OLD)
        with pytest.raises(OSError, match=NO_SPACE):
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
    with pytest.raises(OSError, match="Is not a regular file"):
        export_weights(device, OLD)


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
