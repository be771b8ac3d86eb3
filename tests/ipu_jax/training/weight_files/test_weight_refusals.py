"""Test what is refused by name: weights that no file holds, files of something else or damaged, and wrong mappings."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

from ipu_jax import Pipeline, Stage, make_train_step
from ipu_jax.io import Saved, export_weights, import_weights
from ipu_jax.training.weight_files import _safetensors
from support.refusals import refusals, refused

ONE, TWO = np.ones(1, np.float32), np.ones(2, np.float32)
A, C = np.ones((6, 4), np.float32), np.ones((2, 3, 5, 7), np.float32)
TREE = {"a": A, "b": A, "c": C}
NUMBER: Any = 3
WRONG: Any = "3"

# what cannot be exported

SUFFIXES = ".safetensors, .npz"
NO_NUMBERS = "make it an array of numbers"
NO_TYPE = "which safetensors does not have: export an npz"
NO_VALUES = "which has no values"
NO_NAME = "a zip archive cannot hold: rename it"


def gone() -> jax.Array:
    array = jax.device_put(ONE)
    array.delete()
    return array


def key() -> jax.Array:
    return jax.random.wrap_key_data(jax.device_put(np.zeros(2, np.uint32)))


def shapes() -> Any:
    return Pipeline([Stage(lambda p, x, mb: x, params="a", ipu=0)]).shard_shapes({"a": ONE})


@refusals(
    *(
        (lambda at, name=name: export_weights(at / name, {"w": ONE}), f"/{name}' has the suffix", SUFFIXES)
        for name in ("w", "w.pt", "w.npy", ".npz", "w.safetensors.gz")
    ),
    (lambda at: export_weights(at / "w.npz", {"w": 3.0}), "leaf 'w' is 3.0", "not an array: make it one"),
    (lambda at: export_weights(at / "w.npz", {"w": "text"}), "leaf 'w' is 'text'", "not an array: make it one"),
    (lambda at: export_weights(at / "w.npz", {"w": np.array(["text"])}), "leaf 'w' is <U4", NO_NUMBERS),
    (lambda at: export_weights(at / "w.npz", {"w": np.array([None])}), "leaf 'w' is object", NO_NUMBERS),
    (lambda at: export_weights(at / "w.npz", {"w\0": ONE}), "'w\\x00'", NO_NAME),
    (lambda at: export_weights(at / "w.npz", {"w" * 70_000: ONE}), "www", NO_NAME),
    (lambda at: export_weights(at / "w.safetensors", {"w": np.array(["text"])}), "leaf 'w' is <U4", NO_TYPE),
    (lambda at: export_weights(at / "w.safetensors", {"w": np.ones(1, complex)}), "leaf 'w' is complex128", NO_TYPE),
    (lambda at: export_weights(at / "w.safetensors", {"__metadata__": ONE}), "'__metadata__'", "for itself: rename it"),
    (lambda at: export_weights(at / "w.npz", {"k": key()}), "leaf 'k' is key<fry>", "export jax.random.key_data"),
    (lambda at: export_weights(at / "w.npz", {"w": ONE}, average=True), "average=True", "average of a run: give"),
    (lambda at: export_weights(at / "w.npz", {"w": gone()}), "an earlier call reused", "what that call returned"),
    (lambda at: jax.jit(lambda w: export_weights(at / "w.npz", w))(ONE), NO_VALUES, "export outside of jax.jit"),
    (lambda at: export_weights(at / "w.npz", shapes()), "weights has ShapeDtypeStruct", NO_VALUES, "give arrays"),
    (lambda at: export_weights(at / "w.npz", TREE, ignore="d*"), "ignore='d*' keeps 3 of 3", "match some of ['a'"),
    (lambda at: export_weights(at / "w.npz", TREE, ignore=["[ab]", "c"]), "'c'] keeps 0 of 3", "match some of ['a'"),
    (
        lambda at: import_weights({"a": ONE}, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), shapes())),
        "does not say where it is",
        "pipeline.shard_shapes",
    ),
)
def test_weights_are_not_exported(call, holds, tmp_path):
    with refused(*holds):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


# files


def read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    import_weights(path, {"w": TWO})


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"text, not weights", b"\xff" * 64, os.urandom(300)])
@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_file_of_something_else_is_refused(tmp_path, content, suffix):
    with refused(str(tmp_path), "is not a safetensors or npz file", "Get it again"):
        read(tmp_path / f"w.{suffix}", content)


def header_of(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def header(at: Path, entries: Any) -> None:
    read(at / "w.safetensors", header_of(entries) + bytes(8))


def entry(at: Path, **fields: Any) -> None:
    header(at, {"w": {**W, **fields}})


def metadata(at: Path, value: Any) -> None:
    header(at, {"w": W, "__metadata__": value})


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADER, ENTRY, METADATA = "its header is damaged", "entry of 'w' is damaged", "its metadata is damaged"
GAPS = "its arrays overlap or leave gaps"
AGAIN = "Export or download it again"


@refusals(
    (lambda at: header(at, b"[]"), HEADER, "list, not an object"),
    (lambda at: header(at, b"{nonsense"), HEADER, AGAIN),
    (lambda at: header(at, b"[" * 100_000), HEADER, AGAIN),
    (lambda at: header(at, b'{"w":1,"w":2}'), HEADER, "a name stands in it twice"),
    (lambda at: header(at, b'{"\xff":1}'), HEADER, AGAIN),
    (lambda at: header(at, {"w": 3}), ENTRY, AGAIN),
    (lambda at: entry(at, shape=[3]), ENTRY, "8 bytes are not a float32[3]"),
    (lambda at: entry(at, shape=[-2]), ENTRY, "-2 is not a size"),
    (lambda at: entry(at, shape=[True, 2]), ENTRY, "True is not a size"),
    (lambda at: entry(at, shape=[1 << 62, 4]), ENTRY, AGAIN),
    (lambda at: entry(at, shape=[1 << 40] * 60_000), ENTRY, "60,000 dims are more than 64"),
    (lambda at: entry(at, shape=[0, 1 << 40, 1 << 40]), ENTRY, "its shape is too large"),
    (lambda at: entry(at, shape="11"), ENTRY, "'1' is not a size"),
    (lambda at: entry(at, data_offsets=[0]), ENTRY, AGAIN),
    (lambda at: entry(at, data_offsets=[8, 16]), GAPS, AGAIN),
    (lambda at: header(at, {"w": W, "v": W}), GAPS, AGAIN),
    (lambda at: entry(at, shape=[4], data_offsets=[0, 16]), "cut short", "8 bytes of arrays", "says 16"),
    (lambda at: entry(at, shape=[1], data_offsets=[0, 4]), "has bytes after its arrays", "Get it again"),
    (lambda at: metadata(at, 3), METADATA, AGAIN),
    (lambda at: metadata(at, {"ipu_jax.crc32": "nonsense"}), METADATA, AGAIN),
    (lambda at: metadata(at, {"ipu_jax.crc32": '{"w": "zz"}'}), METADATA, AGAIN),
    (lambda at: metadata(at, {"ipu_jax.crc32": "[" * 100_000}), METADATA, AGAIN),
)
def test_a_header_that_contradicts_itself_is_refused(call, holds, tmp_path):
    with refused(str(tmp_path), "again", *holds):
        call(tmp_path)


def npz_of(header: dict[str, Any], values: bytes, comment: str) -> bytes:
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
    seen = list[np.ndarray]()
    for taken in (
        Saved("w"),
        Saved("w").astype("float64"),
        Saved("w").apply(lambda array: seen.append(array) or array),
    ):
        with refused("1 problem:", f"dtype: leaf 'w' is float32[2], and the array {dtype}[2]", "has no meaning here"):
            import_weights(path, {"w": TWO}, mapping={"w": taken}, cast=True)
    assert seen == []
    assert import_weights(path, {}, ignore="w") == {}


def archive(at: Path, entries: dict[str, bytes]) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, data in entries.items():
            file.writestr(name, data)
    read(at / "w.npz", content.getvalue())


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


MANY_BRACKETS = b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"-" * 9000 + b"1, }\n"
NPY = b"\x93NUMPY\x01\x00"


def index(at: Path, content: Any) -> None:
    save_file({"half": TWO}, at / "1.safetensors")
    path = at / "model.safetensors.index.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"weight_map": content}))
    import_weights(path, {"half": TWO, "ids": TWO})


def twice(at: Path) -> None:
    save_file({"a": ONE}, at / "1.safetensors")
    import_weights([at / "1.safetensors"] * 2, {"a": ONE})


@refusals(
    (lambda at: archive(at, {"archive/data.pkl": b"", "archive/data/0": b""}), "'archive/data.pkl'", "save torch's"),
    (lambda at: archive(at, {"readme.txt": b"words"}), "'readme.txt' is not an array", "numpy.savez"),
    (lambda at: archive(at, {"w.npy": b"words"}), "is damaged", AGAIN),
    (lambda at: archive(at, {"w.npy": NPY}), "is damaged", AGAIN),
    (lambda at: archive(at, {"w.npy": NPY + b"\x61\x23" + MANY_BRACKETS}), "is damaged: ", AGAIN),
    (lambda at: archive(at, {"w.npy": npy(TWO) + b"more"}), "'w' has bytes after its array", "Get it again"),
    (lambda at: archive(at, {"w.npy": npy(np.array([{}], object))}), "'w.npy' has Python objects", AGAIN),
    # several files, and the index of several
    (lambda at: index(at, "{"), "is damaged", "Expecting property name", AGAIN),
    (lambda at: index(at, []), "it has no", '"weight_map"', AGAIN),
    (lambda at: index(at, {"half": "../half.safetensors"}), "'../half.safetensors'", "not a file beside", AGAIN),
    (lambda at: index(at, {"ids": "1.safetensors"}), "'ids' is in 1.safetensors", "which does not"),
    (twice, "'a' is in ", "1.safetensors: give one of them"),
)
def test_files_of_something_else_and_files_that_contradict_each_other_are_refused(call, holds, tmp_path):
    with refused(str(tmp_path), *holds):
        call(tmp_path)


def test_a_huge_header_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_safetensors, "_LARGEST_HEADER", 100)
    save_file({f"w{k}": ONE for k in range(9)}, tmp_path / "w.safetensors")
    with refused(str(tmp_path), "is not a safetensors or npz file, or is cut short", "Get it again"):
        import_weights(tmp_path / "w.safetensors", {"w": ONE})


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        import_weights(tmp_path / "none.npz", {"w": ONE})
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        index(tmp_path, {"half": "gone.safetensors"})


# how leaves are made


def made(saved: Saved, like: Any = A) -> None:
    tree = {**TREE, "half": A.astype(np.float16)}
    import_weights(tree, {"w": like}, mapping={"w": saved}, ignore=set(tree) - set(saved.names))


@refusals(
    (lambda: made(Saved("a").transpose(0, 0)), "transpose(0, 0): float32[6, 4]", "permutation (0, 0)"),
    (lambda: made(Saved("a").transpose(0, 2)), "transpose(0, 2): float32[6, 4]", "axis 2 is out of bounds"),
    (lambda: made(Saved("a").reshape(5, -1)), "reshape(5, -1): float32[6, 4]", "(size 24)"),
    (lambda: made(Saved("a").reshape(-1, -1)), "reshape(-1, -1): float32[6, 4]", "one unknown axis size"),
    (lambda: made(Saved("a").part(3, of=3)), "part(3, of=3, dim=0): float32[6, 4]", "dim 0 has no part 3 of 3"),
    (lambda: made(Saved("a").part(0, of=4)), "part(0, of=4, dim=0): float32[6, 4]", "dim 0 has no part 0 of 4"),
    (
        lambda: made(Saved("a").part(0, of=[2, 3])),
        "part(0, of=[2, 3], dim=0): float32",
        "dim 0 has no part 0 of (2, 3)",
    ),
    (lambda: made(Saved("a", "c").join(0)), "join(0): float32[6, 4], float32[2, 3, 5, 7]", "oncatenate"),
    (lambda: made(Saved("a", "half").join(0)), "join(0): float32[6, 4], float16[6, 4]", "several dtypes", "by astype"),
    (lambda: made(Saved("a", "b").stack(3)), "stack(3): float32[6, 4], float32[6, 4]", "axis 3 is out of bounds"),
    (lambda: made(Saved("a", "b")), "2 arrays remain", ".join(dim) or .stack(dim)"),
)
def test_a_step_that_cannot_be_done_is_named(call, holds):
    with refused("leaf 'w' float32[6, 4] is Saved(", "which cannot be made", *holds):
        call()


@refusals(
    (lambda: Saved(), "Saved()", "does not name arrays: give their names"),
    (lambda: Saved("a", NUMBER), "Saved('a', 3)", "does not name arrays: give their names"),
    (lambda: Saved("a").transpose(WRONG, 0), "transpose('3', 0)", "not an int: give ints"),
    (lambda: Saved("a").part(0, of=WRONG), "part('3',)", "not an int: give ints"),
    (lambda: Saved("a").astype("float17"), "dtype='float17'", "is not a dtype: give one such as"),
    # a function's result is known when it has run
    (lambda: made(Saved("a").apply(lambda a: a[0])), "'w' is float32[6, 4]", "the array float32[4], by Saved('a')"),
    (
        lambda: made(Saved("a").apply(lambda a: a.astype("float64"))),
        "dtype: leaf 'w'",
        "float64[6, 4]",
        "cast=True rounds",
    ),
    # sources and likes
    (lambda: import_weights({"w": 3}, {"w": A}), "the source's leaf 'w' is 3", "not an array: give arrays, or a path"),
    (lambda: import_weights({"w": A}, {"w": 3}), "like has a leaf 'w', 3", "not an array: give arrays or shapes"),
    (lambda: import_weights({"k": A}, {"k": key()}), "like has a leaf 'k'", "give arrays or shapes"),
)
def test_a_mapping_or_a_tree_is_refused(call, holds):
    with refused(*holds):
        call()


def test_the_state_of_a_training_is_not_what_weights_are_like():
    state = make_train_step(lambda w, rows: jnp.mean(rows * w), optax.sgd(0.1)).init(jnp.ones(3))
    with refused("a TrainState", "give like=state.params"):
        import_weights({"w": A}, state)


@pytest.mark.parametrize(
    ("stored", "wanted", "value"),
    [
        ("float32", "float16", 1e6),
        ("float64", "bfloat16", 1e300),
        ("int64", "int32", 2**31),
        ("float32", "int32", 1.5),
        ("float32", "int32", np.nan),
        ("int32", "bool", 2),
    ],
)
def test_numbers_that_the_dtype_has_no_place_for_are_refused(stored, wanted, value):
    source, like = [np.array([1, value], stored)], [np.zeros(2, jnp.dtype(wanted))]
    ways: list[dict[str, Any]] = [{"cast": True}, {"mapping": {"0": Saved("0").astype(jnp.dtype(wanted))}}]
    for options in ways:
        with refused(f"{stored}[2] has numbers", f"{wanted} does not hold", "choose a dtype"):
            import_weights(source, like, **options)


@pytest.mark.parametrize("dims", [5, 11, 64])
def test_a_wrong_shape_of_many_dims_is_refused_at_once(dims):
    with refused("1 problem:", "shape: leaf 'w' is "):
        import_weights({"w": np.zeros((1,) * dims)}, {"w": np.zeros((1,) * (dims - 1))})


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_long_name_is_quoted_by_its_ends(suffix, tmp_path):
    long = 30_000 if suffix == ".npz" else 100_000
    path = tmp_path / f"file{suffix}"
    export_weights(path, {"begin" + "x" * long + "end": ONE, "y" * long: ONE})
    for like in ({"a": ONE}, {"y" * long: TWO}):
        with pytest.raises(ValueError, match=r"unexpected: 'beginx+\.\.\.x+end' ") as raised:
            import_weights(path, like)
        assert len(str(raised.value).replace(next(iter(like)), "")) < 1000
