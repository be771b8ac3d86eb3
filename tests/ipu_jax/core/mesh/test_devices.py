"""Test virtual IPUs and the window of steps in flight. Tests before a backend has started run in a new process."""

import copy
import os
import pickle
import subprocess
import sys
import weakref
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_train_step
from ipu_jax.core.mesh import devices, in_flight
from ipu_jax.core.mesh.devices import ALL_IPUS, IPU_AXIS, REPLICA_AXIS, AllIpus, configure, make_mesh
from ipu_jax.core.mesh.in_flight import InFlight
from ipu_jax.steps import replicate
from ipu_jax.training.update import replicas
from support.refusals import refusals, refused


@pytest.fixture(autouse=True)
def _a_backend_and_no_steps():
    assert len(jax.devices()) == 8  # later no other number can be had
    in_flight._outstanding.clear()


def in_a_fresh_process(code: str, **environment: str) -> str:
    env = {
        key: value for key, value in os.environ.items() if key not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PJRT_NPROC")
    }
    done = subprocess.run(
        [sys.executable, "-c", f"from ipu_jax.core.mesh.devices import configure, make_mesh\nimport jax\n{code}"],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


THREADS = """
import os
names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
print(len(found), len(jax.devices()), names.count("tf_XLAEigen"), os.environ.get("PJRT_NPROC"))
"""
CORES = len(os.sched_getaffinity(0))
SIX_OF_A_FLAG = {"XLA_FLAGS": "--xla_force_host_platform_device_count=6"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "environment", "found", "threads"),
    [
        ("configure(4) and configure(3)", {}, "3 4", CORES + 4),
        ("configure(2, cores='one per IPU')", {"PJRT_NPROC": "7"} | SIX_OF_A_FLAG, "2 6", 7),
        ("configure(3, cores='one per IPU')", {}, "3 3", 3),
        ("configure(2)", {"JAX_NUM_CPU_DEVICES": "5"}, "2 5", CORES + 5),
        ("jax.devices() and configure(1)", {}, "1 1", CORES),
    ],
    ids=["twice", "flags", "one per IPU", "environment", "started"],
)
def test_configure_makes_the_devices_that_are_asked_for_and_a_thread_pool_as_large_as_they_need(
    call, environment, found, threads
):
    left = environment.get("PJRT_NPROC")  # nothing is left for processes that this one starts
    assert in_a_fresh_process(f"found = {call}\n{THREADS}", **environment) == f"{found} {threads} {left}"


def test_all_ipus_is_one_object_with_a_plain_repr():
    assert repr(ALL_IPUS) == "ALL_IPUS"
    assert pickle.loads(pickle.dumps(ALL_IPUS)) is ALL_IPUS
    assert copy.deepcopy(ALL_IPUS) is ALL_IPUS
    assert isinstance(ALL_IPUS, AllIpus)


def window(*outputs: Any, **options: Any) -> Any:
    return lambda: InFlight(**options).admit(*outputs)


@refusals(
    (lambda: configure(True), "num_ipus=True", "count", "an int of at least 1"),
    (lambda: make_mesh(0, 1), "replicas=0", "count", "an int of at least 1"),
    (lambda: make_mesh(1, -1), "ipus_per_replica=-1", "count", "an int of at least 1"),
    (window(limit="2"), "limit='2'", "count", "an int of at least 1"),
    *((window(outputs), "outputs hold no live", "to wait for") for outputs in ((), None, {"loss": 1.0})),
    (lambda: configure(1, cores=cast(Any, "shard")), "cores='shard'", "did you mean 'shared'?"),
    (lambda: configure(9), "num_ipus=9", "CPU backend with 8", "call configure(9) before", "JAX_NUM_CPU_DEVICES=9"),
    (
        lambda: make_mesh(3, 4),
        "replicas=3 x ipus_per_replica=4 needs 12 IPUs",
        "CPU backend with 8",
        "call configure(12) before",
        "JAX_NUM_CPU_DEVICES=12",
    ),
)
def test_ipus_that_there_cannot_be_are_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.parametrize("num_ipus", [1, 3, 8, np.int64(3)])
def test_configure_is_content_with_a_backend_that_holds_enough(num_ipus):
    assert configure(num_ipus) == jax.devices()[:num_ipus]


def test_the_mend_on_a_real_accelerator_is_another(monkeypatch):
    class OneGpu:
        platform = "gpu"

    monkeypatch.setattr(jax, "local_devices", lambda: [OneGpu()])
    with refused("num_ipus=2", "GPU platform has 1", "use fewer IPUs, or set JAX_PLATFORMS=cpu"):
        configure(2)


@pytest.mark.parametrize("platform", ["nonsense", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_platform_that_the_machine_lacks_is_refused_with_the_mend(platform):
    code = """
try:
    configure(2)
except ValueError as error:
    print(error)
"""
    line = in_a_fresh_process(code, JAX_PLATFORMS=platform)
    if platform == "cuda" and not line:
        pytest.skip("this machine has it")
    assert line.startswith(f"JAX_PLATFORMS={platform} asks for a platform that does not start on this machine")
    assert line.endswith(": set JAX_PLATFORMS=cpu for virtual IPUs, or unset it")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("replicas", "ipus_per_replica"), [(1, 1), (1, 8), (2, 4), (8, 1), (3, 2), (np.int64(2), np.uint8(4))]
)
def test_make_mesh_names_its_axes_and_takes_the_first_devices(replicas, ipus_per_replica):
    mesh = make_mesh(replicas, ipus_per_replica)
    assert mesh.axis_names == (REPLICA_AXIS, IPU_AXIS) == ("replica", "ipu")
    assert mesh.devices.shape == (replicas, ipus_per_replica)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert list(mesh.devices.flat) == jax.devices()[: replicas * ipus_per_replica]


# given devices


def sum_of_squares(w: Any, rows: Any) -> Any:
    return jnp.mean((rows @ w["w"]) ** 2)


def made_of(kind: str, given: Any, ipus: int = 2) -> Any:
    """Return a model on the first `ipus` of the given devices, or of all if None."""
    if kind == "function":
        w, rows = {"w": jnp.ones(3)}, jnp.ones((4, 3))
        return Pipeline.from_function(sum_of_squares, w, rows, ipus=1, devices=given)
    stages = [Stage(lambda p, x, mb: mb @ p, params="a", ipu=0), Stage(lambda p, x, mb: jnp.mean(x), ipu=ipus - 1)]
    return Pipeline(stages, mesh=make_mesh(1, ipus, devices=given))


def test_make_mesh_takes_the_first_of_the_given_devices():
    last = jax.devices()[4:]
    forms: list[Any] = [last, tuple(last), np.array(last)]
    for given in forms:
        assert make_mesh(2, 2, devices=given).devices.tolist() == [last[:2], last[2:]]
        assert make_mesh(1, 3, devices=given).devices.tolist() == [last[:3]]
    assert make_mesh(1, 2, devices=last[::-1]).devices.tolist() == [[last[3], last[2]]], "in their order"


WIDER = {
    "options": lambda model: make_train_step(model, optax.sgd(0.1), TrainOptions(replication_factor=2)).model,
    "options and precision": lambda model: (
        make_train_step(
            model, optax.sgd(0.1), TrainOptions(replication_factor=2, gradient_accumulation=4, precision="16.16")
        ).model
    ),
    "replicate": lambda model: replicate(model, replication_factor=2),
    "replicate by IPUs": lambda model: replicate(model, num_ipus=2 * model.ipus),
}


@pytest.mark.parametrize("kind", ["stages", "function"])
@pytest.mark.parametrize("wider", WIDER)
def test_a_wider_mesh_is_of_the_given_devices(kind, wider):
    given = [jax.devices()[k] for k in (1, 3, 4, 6)]
    model = made_of(kind, given)
    assert model.mesh.devices.tolist() == [given[: model.ipus]]
    mesh = WIDER[wider](model).mesh
    assert mesh.shape["replica"] == 2
    assert list(mesh.devices.flat) == given[: mesh.size]


@pytest.mark.parametrize("options", [{}, {"precision": "16.16", "gradient_accumulation": 3}])
def test_replicas_stay_on_the_given_devices(options):
    given = jax.devices()[5:8]
    replicas = replicate(sum_of_squares, replication_factor=2, devices=given)
    step = make_train_step(replicas, optax.sgd(0.1), TrainOptions(**options))
    assert list(replicas.mesh.devices.flat) == list(step.model.mesh.devices.flat) == given[:2]
    state, _ = step(step.init({"w": jnp.ones(3)}), jnp.ones((2, step.gradient_accumulation, 4, 3)))
    assert {leaf.sharding.device_set == set(given[:2]) for leaf in jax.tree.leaves(state)} == {True}


def test_equal_meshes_of_other_devices_are_widened_each_from_its_own():
    """Jax makes equal meshes one object."""
    given = [jax.devices()[k] for k in (0, 1, 6, 7)]
    of_all, of_given = made_of("stages", None), made_of("stages", given)
    again, of_last = made_of("stages", None), made_of("stages", given[:2])
    assert of_all.mesh is of_given.mesh
    for model, expected in ((of_all, jax.devices()[:4]), (of_given, given), (again, jax.devices()[:4])):
        for wider in WIDER.values():
            assert list(wider(model).mesh.devices.flat) == expected
    with refused("replicas=2 x ipus_per_replica=2 needs 4 IPUs", "2 cpu devices were given", "more devices"):
        replicate(of_last, replication_factor=2)


def mesh_of(given: Any) -> Any:
    return lambda: make_mesh(1, 2, devices=cast(Any, given() if callable(given) else given))


@refusals(
    (mesh_of(lambda: jax.devices()[:1]), "needs 2 IPUs", "1 cpu devices were given", "use fewer IPUs, or more devices"),
    (mesh_of([]), "devices=[]", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of([0, 1]), "devices=[0, 1]", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of("cpu"), "devices='cpu'", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of(2), "devices=2", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of(lambda: jax.devices()[0]), "devices=CpuDevice(id=0)", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of(lambda: [*jax.devices()[:2], None]), "None]", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of(lambda: make_mesh(2, 2).devices), "devices=array(", "not a list of devices", "jax.devices()[:4]"),
    (mesh_of(lambda: [jax.devices()[3]] * 2), "CpuDevice(id=3)]", "different devices", "each of them once"),
    (lambda: made_of("stages", jax.devices()[:1]), "needs 2 IPUs", "1 cpu devices were given"),
    (lambda: made_of("function", []), "devices=[]", "not a list of devices"),
    (
        lambda: replicate(sum_of_squares, num_ipus=2, devices=jax.devices()[:1]),
        "replicas=2",
        "1 cpu devices were given",
    ),
    (
        lambda: replicate(made_of("stages", None), num_ipus=4, devices=jax.devices()),
        *("devices=[", "a pipeline has its own"),
    ),
)
def test_devices_that_are_none_are_refused(call, holds):
    with refused(*holds):
        call()


# described devices


def test_meshes_are_of_described_devices_as_long_as_these_are_described():
    described = jax.devices()[3:6]
    with devices.describing(described):
        assert configure(2) == described[:2]
        model = made_of("stages", None, ipus=1)
        assert make_mesh(1, 3).devices.tolist() == [described]
        assert make_mesh(1, 2, devices=jax.devices()[6:]).devices.tolist() == [jax.devices()[6:]]
        with devices.describing(described[1:]):
            assert make_mesh(1, 2).devices.tolist() == [described[1:]]
        assert make_mesh(1, 2).devices.tolist() == [described[:2]]
        for call in (lambda: configure(4), lambda: make_mesh(2, 2)):
            with refused("4", "3", "JAX_NUM_CPU_DEVICES=4"):
                call()
    assert configure(4) == jax.devices()[:4]
    assert make_mesh(2, 2).devices.tolist() == [jax.devices()[:2], jax.devices()[2:4]]
    assert list(WIDER["options"](model).mesh.devices.flat) == described[:2], "it is still of what was described"
    with pytest.raises(KeyError), devices.describing(described):
        raise KeyError
    assert configure(1) == jax.devices()[:1]
    for wrong in ([], [0]):
        with refused(f"devices={wrong}", "not a list of devices"), devices.describing(wrong):
            pass


@pytest.fixture
def all_are_described(monkeypatch):
    described = lambda device: True
    for module in (devices, replicas):
        monkeypatch.setattr(module, "is_described", described)


MATRIX, ROWS = np.eye(3, dtype=np.float32), jax.ShapeDtypeStruct((2, 1, 4, 3), np.float32)


def stateful() -> Any:
    return Pipeline([Stage(lambda p, x, mb, *, state: Outputs(jnp.mean(mb @ p), state=state), params="a", state="s")])


@refusals(
    (lambda: made_of("stages", None).shard({"a": MATRIX}), "shard needs devices", "2 x cpu", "use shard_shapes("),
    (lambda: stateful().shard_state({"s": MATRIX}), "shard_state needs devices", "1 x cpu", "use shard_state_shapes("),
    (
        lambda: replicate(sum_of_squares, num_ipus=2).shard({"w": MATRIX}),
        *("shard needs devices", "2 x cpu", "use shard_shapes("),
    ),
    *(
        (lambda make=make: make_train_step(make(), optax.sgd(0.1)).init({"w": MATRIX}), "init needs", "use shapes(")
        for make in (stateful, lambda: sum_of_squares)
    ),
    (
        lambda: make_train_step(sum_of_squares, optax.sgd(0.1)).restore(
            dict.fromkeys(("params", "optimizer", "stages", "scale", "step", "key"))
        ),
        *("restore needs devices", "1 x cpu", "use shapes("),
    ),
    (lambda: make_mesh(2, 2, devices=jax.devices()[:3]), "needs 4 IPUs", "3 cpu devices were described", "fewer IPUs"),
)
def test_described_devices_hold_no_arrays(call, holds, all_are_described):
    with refused(*holds):
        call()


@pytest.mark.slow
def test_programs_are_lowered_for_described_devices(all_are_described):
    given = jax.devices()[2:6]
    deep = lambda params, rows: jnp.mean(rows @ params[0] @ params[1])
    pipeline = Pipeline.from_function(deep, [MATRIX] * 2, jnp.ones((4, 3)), ipus=2, devices=given)
    weights = [MATRIX] * 2
    assert {type(leaf) for leaf in jax.tree.leaves(pipeline.shard_shapes(weights))} == {jax.ShapeDtypeStruct}
    of_function = replicate(sum_of_squares, replication_factor=2, devices=given)
    for model, params in ((pipeline, weights), (of_function, {"w": MATRIX})):
        step = make_train_step(model, optax.adam(0.1), TrainOptions(replication_factor=2))
        state = step.shapes(params)
        assert {device for leaf in jax.tree.leaves(state) for device in leaf.sharding.device_set} <= set(given)
        assert step.lower(state, ROWS).compile().memory_analysis() is not None


def test_a_mesh_that_jax_made_of_described_devices_is_widened_from_all_of_them(all_are_described):
    mesh = jax.sharding.Mesh(np.array([[jax.devices()[k] for k in (7, 2, 5)]]), (REPLICA_AXIS, IPU_AXIS))
    stages = [Stage(lambda p, x, mb: mb @ p, params="a", ipu=0), Stage(lambda p, x, mb: jnp.mean(x), ipu=2)]
    assert list(replicate(Pipeline(stages, mesh=mesh), replication_factor=2).mesh.devices.flat) == jax.devices()[:6]


def test_the_window_waits_for_a_step_that_has_large_outputs_only():
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x))  # some tenths of a second
    window = InFlight(limit=1)
    before = x = step(jnp.ones((200, 200)))
    window.admit(x)
    for _ in range(2):
        before, x = x, step(x)
        window.admit(x)
        assert before.is_ready()


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
def test_a_thousand_steps_with_collectives_are_dispatched_without_waiting(donate):
    mesh = make_mesh(1, 8)

    @partial(jax.jit, donate_argnums=(0,) if donate else ())
    @partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(IPU_AXIS), out_specs=(PartitionSpec(IPU_AXIS),) * 2)
    def step(state):
        total = jax.lax.psum(state, IPU_AXIS)
        return state + 1.0, total / 8

    window = InFlight(limit=4)
    state = jax.device_put(jnp.zeros((8, 64)), jax.sharding.NamedSharding(mesh, PartitionSpec(IPU_AXIS)))
    means = None
    for _ in range(1000):
        state, means = step(state)
        window.admit((state, means))
        assert window.outstanding <= 4
    assert means is not None
    np.testing.assert_array_equal(means, np.full((8, 64), 999.0))


def test_all_outputs_of_a_step_are_ready_when_the_smallest_is():
    """The window depends on this, also for an output that is computed early and for an input that is returned."""
    mesh = make_mesh(1, 8)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(IPU_AXIS)),
        out_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(IPU_AXIS)),
    )
    def step(handed_on, early, x):
        def layer(x, _):
            return jnp.sin(x @ x) + jax.lax.psum(x, IPU_AXIS), None

        return handed_on, early + 1, jax.lax.scan(layer, x, None, length=4)[0]

    arguments = jnp.float32(0), jnp.float32(0), jnp.ones((8 * 150, 150))
    jax.block_until_ready(step(*arguments))
    for which in (0, 1):
        outputs = step(*arguments)
        outputs[which].block_until_ready()
        assert outputs[2].is_ready()


def test_the_window_waits_for_the_oldest_step_that_still_can_be():
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    window = InFlight(limit=2)
    x = increment(jnp.zeros(()))
    for _ in range(10):
        window.admit(x)
        x = increment(x)
        assert window.outstanding <= 2
    assert x == 11


def test_the_window_waits_for_the_next_step_where_the_oldest_was_donated():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x))  # some tenths of a second
    jax.block_until_ready(x := slow(jnp.ones((200, 200))))
    window = InFlight(limit=1)
    donated = jax.jit(lambda x: x + 1)(1)
    window.admit(donated)
    donated.delete()
    window.admit(x := slow(x))
    assert x.is_ready()
    assert not window.outstanding


def test_the_window_keeps_its_overlap_beside_a_donated_counter():
    step = jax.jit(lambda count: (count + 1, count * 0.5), donate_argnums=0)
    window = InFlight(limit=3)
    count = jnp.int32(0)
    for _ in range(10):
        count, loss = step(count)
        window.admit((count, loss))
    assert window.outstanding == 3


def test_all_windows_of_a_process_share_one_bound():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x))
    first, second = InFlight(limit=3), InFlight(limit=2)
    outputs = [jax.block_until_ready(slow(jnp.ones((100, 100))))]
    for window in (first, first, first, second):
        window.admit(slow(outputs[0]))
        outputs.append(slow(outputs[0]))
        assert first.outstanding + second.outstanding <= 3
    assert (first.outstanding, second.outstanding) == (1, 1)


def test_the_error_of_a_step_is_raised_in_its_own_loop_only(monkeypatch):
    def fail(_):
        raise RuntimeError("mine")

    mine, other, output = InFlight(limit=1), InFlight(limit=1), jnp.ones(())
    with monkeypatch.context() as failing:
        failing.setattr(type(output), "block_until_ready", fail)
        mine.admit(output)
        other.admit(output)  # waits for the step of `mine`
        assert (mine.outstanding, other.outstanding) == (0, 1)
    other.admit(output)
    with pytest.raises(RuntimeError, match="mine"):
        mine.admit(output)
    mine.admit(output)  # once
    monkeypatch.setattr(type(output), "block_until_ready", fail)
    with pytest.raises(RuntimeError, match="mine"):
        mine.admit(output)


def test_the_window_holds_no_large_output():
    step = jax.jit(lambda x: (x + 1, x.sum()))
    window = InFlight(limit=3)
    x, loss = step(jnp.zeros(10_000))
    window.admit((x, loss))
    large = weakref.ref(x)
    del x
    assert large() is None


def test_the_window_leaves_a_step_alone_that_is_being_traced():
    window = InFlight(limit=1)

    @jax.jit
    def step(x):
        window.admit(x)
        return x + 1

    assert step(1) == 2
    assert window.outstanding == 0
