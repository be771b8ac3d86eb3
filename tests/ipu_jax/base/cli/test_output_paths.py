"""Test that what is to be written is tried before it is needed."""

import os
import re
import resource
from pathlib import Path

import pytest

from ipu_jax.base.cli.output_paths import check_file

PNG = (".png",)


@pytest.mark.parametrize("name", ["new.png", "NEW.PNG", "a b's.png"])
def test_a_picture_that_can_be_written_leaves_nothing_behind(name, tmp_path):
    check_file("--plot", tmp_path / name, PNG)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_is_there_and_a_link_to_one_stay_as_they_are(tmp_path):
    picture, link, broken = (tmp_path / name for name in ("old.png", "link.png", "broken.png"))
    picture.write_bytes(b"drawn before")
    link.symlink_to(picture)
    broken.symlink_to(tmp_path / "new.png")
    for path in (picture, link, broken):
        check_file("--plot", path, PNG)
    assert picture.read_bytes() == b"drawn before"
    assert link.is_symlink()
    assert broken.is_symlink()
    assert not broken.exists()


def test_a_picture_may_have_several_formats(tmp_path):
    check_file("--plot-schedule", tmp_path / "x.SVG", (".svg", ".png"))
    line = "--plot-schedule x.gif has the wrong suffix: give a name that ends in .svg or .png"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        check_file("--plot-schedule", Path("x.gif"), (".svg", ".png"))


def test_a_disk_that_has_no_room_for_it_is_found_out(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ValueError, match=r"x\.png cannot be written to \(File too large\): give another file$"):
            check_file("--plot", tmp_path / "x.png", PNG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "full.png").symlink_to("/dev/full")
    for name in ("pipe.png", "full.png"):
        path = tmp_path / name
        message = f"--plot {path} is not a file that can be written: give another file"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_file("--plot", path, PNG)
