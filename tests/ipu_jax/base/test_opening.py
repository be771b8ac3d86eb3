"""Files that others may have planted are refused at once, and nothing is written through a link."""

import os
import socket
from pathlib import Path

import pytest

from ipu_jax.base import opening

pytestmark = pytest.mark.timeout(20)  # a pipe or a device without an end would take for ever


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("precious"))


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


_PLANTED = {
    "link": (_link, "symbolic link"),
    "loop": (_loop, "symbolic link"),
    "device": (_device, "symbolic link"),
    "pipe": (lambda path: os.mkfifo(path), "not a regular file"),
    "socket": (_socket, "not a regular file"),
    "folder": (lambda path: path.mkdir(), "[Nn]ot a regular file|[Dd]irectory"),
}


@pytest.mark.parametrize("kind", _PLANTED)
def test_what_is_no_file_is_refused_and_nothing_is_written(tmp_path: Path, kind: str) -> None:
    plant, words = _PLANTED[kind]
    precious, path = tmp_path / "precious", tmp_path / "name"
    precious.write_text("my thesis")
    plant(path)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(OSError, match=words):
            opening.regular(path, flags)
    with pytest.raises(FileExistsError):
        opening.created(path)
    with pytest.raises(FileExistsError):
        opening.write_new(path, b"x")
    with pytest.raises(OSError, match=words):
        opening.content(path, most=10)
    assert precious.read_text() == "my thesis"


def test_a_link_may_be_followed_to_a_file_and_to_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    (tmp_path / "good").symlink_to("blob")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with opening.reading(tmp_path / "good", follow=True) as file:
        assert file.read() == b"12345"
    with pytest.raises(OSError, match="not a regular file"):
        opening.reading(tmp_path / "zero", follow=True)


def test_content_is_bounded_and_new_files_are_private(tmp_path: Path) -> None:
    opening.write_new(tmp_path / "a", b"12345")
    assert opening.content(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        opening.content(tmp_path / "a", most=4)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    folder = os.open(tmp_path, os.O_RDONLY)
    os.close(opening.regular("b", os.O_WRONLY | os.O_CREAT, folder=folder))
    with opening.reading("b", folder=folder) as file:
        assert file.read() == b""
    os.close(folder)
