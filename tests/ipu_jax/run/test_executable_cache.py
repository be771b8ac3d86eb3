"""Test the executable cache: what is kept compiles once, and jax's settings are restored.

In tests/mnist_example/test_mnist_instances.py a second start of a command compiles nothing.
"""

import logging
import os
import re
import shutil
import warnings

import jax
import pytest
from jax._src import compilation_cache

from ipu_jax.steps import ExecutableCache
from support.refusals import refusals, refused


def test_a_program_is_compiled_once_and_jax_is_left_as_it_was(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    first, second = ExecutableCache(tmp_path), ExecutableCache(tmp_path)
    for cache in (first, second):
        with cache:
            jax.jit(lambda x: 7 * x - 2).lower(1.0).compile()
    assert (first.hits, first.misses) == (0, 1)
    assert str(second) == "executable cache: 1 hits, 0 misses"
    assert {name: jax.config.values[name] for name in names} == before
    files = sorted(tmp_path.iterdir())
    jax.jit(lambda x: 7 * x - 3).lower(1.0).compile()
    assert sorted(tmp_path.iterdir()) == files
    assert (second.hits, second.misses) == (1, 0)


def compiled(folder, *factors):
    """Return hits and misses of similar programs with the same name, and their results for 1."""
    with ExecutableCache(folder) as cache:
        # a new function each time: jax uses the cache only for programs that it has not compiled in this process
        values = [
            float(jax.jit(lambda x, factor=factor: factor * x + 1).lower(1.0).compile()(1.0)) for factor in factors
        ]
    assert values == [factor + 1 for factor in factors]
    return cache.hits, cache.misses


def test_a_folder_by_another_name_and_a_copy_of_it_are_the_same(tmp_path, monkeypatch):
    folder, link, copy = tmp_path / "kept", tmp_path / "link", tmp_path / "elsewhere" / "copy"
    assert compiled(folder, 2.0, 3.0) == (0, 2)
    link.symlink_to(folder)
    shutil.copytree(folder, copy)
    monkeypatch.chdir(tmp_path)
    for name in (folder, "kept", "./kept", "kept/", f"{folder}/", link, "kept/../link", copy, "elsewhere/copy"):
        assert compiled(name, 2.0, 3.0) == (2, 0), name
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in copy.iterdir())


def with_a_bit_flipped(entry):
    middle = len(entry) // 2
    return entry[:middle] + bytes([entry[middle] ^ 1]) + entry[middle + 1 :]


DAMAGED = {
    "truncated": lambda entry: entry[: len(entry) // 2],
    "without anything": lambda entry: b"",
    "with a bit flipped": with_a_bit_flipped,
    # a complete file that is not an executable; compressed as jax does it
    "of something else": lambda entry: compilation_cache.compress_executable(b"\0\0\0\0hello"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_entry_is_told_of_and_written_anew(damage, tmp_path, caplog):
    factors = (2.0, 3.0, 4.0)
    # the first program that is looked for; the others of its name are looked for after it
    assert compiled(tmp_path, factors[0]) == (0, 1)
    (broken,) = tmp_path.iterdir()
    assert compiled(tmp_path, *factors) == (1, 2)
    contents = {entry: entry.read_bytes() for entry in tmp_path.iterdir()}
    broken.write_bytes(DAMAGED[damage](contents[broken]))
    with caplog.at_level(logging.WARNING):
        assert compiled(tmp_path, *factors) == (2, 1)
    (line,) = [record.getMessage() for record in caplog.records]
    why = ".+" if damage == "of something else" else r"error: Error -\d while decompressing data: [^\n]+"
    entry = rf"executable cache: an entry of jit__lambda in {tmp_path}"
    assert re.fullmatch(rf"{entry} cannot be read \({why}\): it is compiled and written anew", line)
    assert compiled(tmp_path, *factors) == (3, 0)
    assert {entry for entry in tmp_path.iterdir()} == contents.keys()
    assert all(entry.read_bytes() == content for entry, content in contents.items() if entry != broken)
    assert len(caplog.records) == 1


def test_other_warnings_stay_warnings_and_what_a_killed_process_set_aside_is_put_back(tmp_path):
    assert compiled(tmp_path, 2.0) == (0, 1)
    (entry,) = tmp_path.iterdir()
    entry.rename(f"{entry}.aside")
    with ExecutableCache(tmp_path), pytest.warns(UserWarning, match="^of something else$"):
        warnings.warn("of something else", stacklevel=1)
    assert compiled(tmp_path, 2.0) == (1, 0)


@refusals(
    (lambda: ExecutableCache(""), "an empty name", "give a folder"),
    (lambda: ExecutableCache(__file__), f"{__file__} is not a folder", "a name that is free"),
    (lambda: ExecutableCache(f"{__file__}/x"), f"{__file__}/x cannot be made", "Not a directory", "another folder"),
    (lambda: ExecutableCache("x" * 300), f"{'x' * 300} cannot be made", "File name too long", "another folder"),
)
def test_a_folder_that_cannot_serve_is_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder that not even root can write to")
def test_a_folder_that_nobody_can_write_to_is_refused():
    with refused("/proc cannot be written to", "No such file or directory", "another folder"):
        ExecutableCache("/proc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_to_write_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match=r"cannot be written to \(Permission denied\): give another folder$"):
        ExecutableCache(tmp_path)
