"""Test what instances exchange, with real processes, against sums that NumPy makes of all parts."""

import json

import numpy as np
import pytest

from support.programs import places, run_programs

EXCHANGES = """
    import json, os, signal, time
    from ipu_jax import popdist
    from ipu_jax.steps import StopRequest

    popdist.init()
    popdist.init()  # a second call does nothing
    import jax, jax.numpy as jnp, ml_dtypes, numpy as np

    own, found = popdist.get_instance_index(), {}
    assert (jax.process_index(), jax.process_count()) == (own, popdist.get_num_instances())
    assert len(jax.local_devices()) == popdist.get_num_local_ipus() == 2

    draw = np.random.default_rng(own).standard_normal
    tree = {
        "loss": 0.1 * own, "count": own + 1, "flag": own == 1,
        "f32": draw((3, 2)).astype(np.float32), "bf16": jnp.asarray(draw(5), jnp.bfloat16),
        "i32": np.arange(3, dtype=np.int32) * own, "none": np.zeros((0, 4), np.float32), "c64": np.complex64(1j * own),
    }
    def told(tree):
        kind = lambda value: str(getattr(value, "dtype", type(value).__name__))
        return {name: [kind(x), list(np.shape(x)), str(np.asarray(x).tolist())] for name, x in tree.items()}
    print(json.dumps(told(tree)))
    for op in ("mean", "sum"):
        found[op] = told(popdist.all_reduce(tree, op))
    large = draw(200_000).astype(np.float32)  # more than goes through the coordination service
    found["large"] = np.asarray(popdist.all_reduce(large, "sum")).tobytes().hex()[:4000]
    found["large of 1"] = popdist.broadcast(large, root=1).tobytes().hex()[:4000]
    key = popdist.broadcast(jax.random.key(own), root=2)
    found["key"] = jax.random.key_data(key).tolist()
    found["seed"] = popdist.broadcast(10 + own)
    for _ in range(20):  # more exchanges than are kept
        popdist.barrier()
    try:
        if own == 1:
            popdist.all_reduce(1.0, timeout=20)
        else:
            popdist.all_reduce(1, timeout=20)
    except popdist.InstancesDifferError as error:
        found["differ"] = str(error)
    popdist.barrier("all are here")
    calls = 0
    with StopRequest() as stop:
        while True:
            calls += 1
            if own == 1 and calls == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.15 if own == 0 else 0.02)  # one is far behind the others
            if stop.due():
                break
    found["stopped"] = calls, stop.asked
    print(json.dumps(found))
    popdist.barrier("all have stopped")
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    ended = run_programs(tmp_path_factory.mktemp("exchanges"), EXCHANGES, places(3, replicas=3, ipus_per_replica=2))
    for one in ended:
        assert one.code == 0, one.stderr
    return ended


@pytest.fixture(scope="module")
def found(ended):
    return [json.loads(one.lines[-1]) for one in ended]


def test_all_instances_get_the_same_bits(found):
    assert found[0] == found[1] == found[2]


KINDS = {"sum": {"bool": "int"}, "mean": {"bool": "float", "int": "float", "int32": "float64"}}


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_the_reduction_is_that_of_numpy(ended, found, op):
    parts = [json.loads(one.lines[0]) for one in ended]
    for name, (kind, shape, text) in found[0][op].items():
        kind_of_part, shape_of_part, _ = parts[0][name]
        assert (kind, shape) == (KINDS[op].get(kind_of_part, kind_of_part), shape_of_part)
        total = sum(np.array(eval(part[name][2]), np.complex128) for part in parts)
        expected = total / 3 if op == "mean" else total
        tolerance = 2**-8 if name == "bf16" else 1e-6
        np.testing.assert_allclose(np.array(eval(text), np.complex128), expected, tolerance, err_msg=name)
    assert found[0][op]["flag"][2] == str({"sum": 1, "mean": 1 / 3}[op])


def test_large_arrays_go_over_the_devices(found):
    arrays = []
    for own in range(3):
        draw = np.random.default_rng(own).standard_normal
        for before in ((3, 2), 5):
            draw(before)
        arrays.append(draw(200_000).astype(np.float32))
    total = (arrays[0].astype(np.float64) + arrays[1] + arrays[2]).astype(np.float32)
    assert found[0]["large"] == total.tobytes().hex()[:4000]
    assert found[0]["large of 1"] == arrays[1].tobytes().hex()[:4000]


def test_a_key_and_a_seed_are_those_of_the_root(found):
    assert found[0]["key"] == [0, 2]
    assert found[0]["seed"] == 10


def test_all_stop_after_the_same_call_although_one_alone_gets_the_signal(found):
    calls, asked = found[0]["stopped"]
    assert calls > 4
    assert asked


def test_different_calls_are_named(found):
    assert found[0]["differ"] == (
        "instance 0 calls all_reduce(mean) PyTreeDef(*) of int64[], instance 1 calls all_reduce(mean) PyTreeDef(*) of "
        "float64[]: all instances must make the same calls, with arrays of the same shapes and dtypes"
    )


@pytest.mark.slow
def test_an_instance_that_does_not_come_is_named(tmp_path):
    program = """
        import time
        from ipu_jax import popdist

        popdist.init()
        if popdist.get_instance_index() == 1:
            time.sleep(6)
        else:
            try:
                popdist.barrier("the middle", timeout=1)
            except popdist.InstancesMissingError as error:
                print(error, flush=True)
    """
    ended = run_programs(tmp_path, program, places(3))
    assert [one.code for one in ended] == [0, 0, 0]
    for one in (ended[0], ended[2]):
        assert one.lines == [
            "barrier 'the middle': instance 1 of 3 did not come within 1 s. All instances must call it, in the same "
            "order; allow more with timeout="
        ]
