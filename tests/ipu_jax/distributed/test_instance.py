"""Test how an instance ends and what its launcher can see of it, with real processes and jax's own distributed runtime.

The limits are far below those of jax alone: a process that raises waits five minutes for the others, and loses its exit
code.
"""

import json

import pytest

from ipu_jax.distributed.processes import beacons
from ipu_jax.distributed.processes.beacons import Phase
from support.programs import places, run_programs

ENDS = """
    import os, sys
    from ipu_jax import popdist

    popdist.init()
    import jax

    own, how = popdist.get_instance_index(), sys.argv[1]
    jax.devices()
    popdist.count_steps(3)
    other = popdist.broadcast(os.getpid(), root=1)
    if own == 1 and how == "raise":
        raise ValueError("a loss of 7")
    if own == 1 and how == "exit":
        sys.exit(7)
    if own == 1 and how == "exit with a text":
        sys.exit("no more")
    if own == 1 and how == "another hook":
        sys.excepthook = sys.__excepthook__
        raise KeyError("other")
    import time
    while how != "well" and os.path.exists(f"/proc/{other}"):
        time.sleep(0.02)  # it does not end before the other
    print("done", flush=True)
    if how != "well":
        os._exit(0)  # it does not wait for jax to miss the other
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "kind", "said"),
    [
        ("raise", 1, "ValueError", "ValueError: a loss of 7"),
        ("exit", 7, "SystemExit", ""),
        ("exit with a text", 1, "SystemExit", "no more"),
        ("another hook", 1, "KeyError", "KeyError: 'other'"),
    ],
)
def test_an_instance_that_fails_ends_at_once_with_its_exit_code(tmp_path, how, code, kind, said):
    own = places(2, run_dir=tmp_path)
    first, second = run_programs(tmp_path, ENDS, own, arguments=[[how]] * 2)  # jax alone takes 5 minutes
    assert second.code == code
    assert said in second.stderr
    assert first.lines == ["done"]  # nothing ended it before
    record = json.loads((tmp_path / "1/error.json").read_text())
    assert record["type"] == kind
    assert not (tmp_path / "0/error.json").exists()
    found = beacons.read(tmp_path / "1/beacon")
    assert found is not None
    assert (found.phase, found.begun, found.finished) == (Phase.FAILED, 3, 3)
    assert found.label.startswith(kind)
    assert found.pid == record["pid"]


@pytest.mark.slow
def test_instances_that_end_well_end_together_with_0(tmp_path):
    ended = run_programs(tmp_path, ENDS, places(2, run_dir=tmp_path), arguments=[["well"]] * 2)
    assert [(one.code, one.lines) for one in ended] == [(0, ["done"])] * 2, ended[0].stderr + ended[1].stderr
    for number in range(2):
        found = beacons.read(tmp_path / f"{number}/beacon")
        assert found is not None
        assert (found.phase, found.begun, found.finished) == (Phase.ENDING, 3, 3)


# of a user who knows nothing of ipu_jax
UNCHANGED = """
    import sitecustomize, subprocess, sys
    import jax
    jax.distributed.initialize()
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.make_array_from_callback((6,), NamedSharding(mesh, P("x")), lambda i: jnp.arange(6.0)[i])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(rows)
    if jax.process_index() == 1 and sys.argv[1:]:
        child = subprocess.run([sys.executable, "-c", "import jax; print(len(jax.devices()))"], capture_output=True)
        print(child.stdout.decode().strip())
    counts = jax.process_index(), jax.process_count(), jax.local_device_count()
    from ipu_jax.distributed.processes import beacons, record
    assert record.current().phase is beacons.Phase.SILENT  # it is not taken for a program that starts for ever
    print(*counts, float(total))
"""


@pytest.mark.slow
def test_an_unchanged_program_finds_its_place(tmp_path):
    own = places(2, replicas=1, ipus_per_replica=6, run_dir=tmp_path)
    ended = run_programs(tmp_path, UNCHANGED, own, arguments=[["a child"]] * 2)
    assert [one.code for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    # a process that the program starts, and that does not join, is a program of its own
    assert [one.lines for one in ended] == [["0 2 3 15.0"], ["3", "1 2 3 15.0"]]
    found = beacons.read(tmp_path / "1/beacon")
    assert found is not None
    assert (found.phase, found.begun) == (Phase.ENDING, 0)


WATCHED = """
    import json, os, pathlib, signal, time
    from ipu_jax import popdist
    from ipu_jax.steps import InFlight
    from ipu_jax.distributed.processes import beacons, record

    popdist.init()
    import jax, jax.numpy as jnp

    beacon, seen = record.current(), []
    slow = jax.jit(lambda x: seen.append(beacon.phase.name) or sum(jnp.sin(x * k) for k in range(3)))
    window, x = InFlight(), jnp.ones(4)
    window.admit(slow(x))
    x = slow(x).block_until_ready()
    window.admit(x)
    seen_of = lambda: beacons.read(record.for_launcher().folder / "beacon")
    made = lambda: [seen_of().begun, seen_of().finished]
    steps = made()
    window.admit(jax.jit(lambda x: seen.append(beacon.phase.name) or x + 1)(x))
    after = beacon.phase.name
    with popdist.busy("resting", seconds=5):
        resting = beacon.phase.name
    pid = os.fork()
    if pid == 0:
        popdist.count_steps()  # not the instance's own
        os._exit(0)
    os.waitpid(pid, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    stacks = pathlib.Path(os.environ["IPU_JAX_RUN_DIR"], "0/stacks")
    while not (stacks.exists() and "program.py" in stacks.read_text()):
        time.sleep(0.02)
    print(json.dumps([seen, steps, after, resting, made()]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_steps_compilations_and_stacks_can_be_watched(tmp_path):
    (one,) = run_programs(tmp_path, WATCHED, [places(1, run_dir=tmp_path)[0] | {"PYTHONWARNINGS": "default"}])
    assert one.code == 0, one.stderr
    seen, steps, after, resting, after_fork = json.loads(one.lines[-1])
    # a program is traced before its first report; what is traced inside it reports first
    assert seen[0] in ("SILENT", "STARTING", "COMPILING")
    assert steps == [2, 2]
    assert after == "STEPPING"
    assert resting == "BUSY"
    assert after_fork == [3, 3]


SLURM = [
    {f"SLURM_{name}": value for name, value in {
        "JOB_ID": "77", "STEP_NODELIST": "127.0.0.1", "NTASKS": "2", "PROCID": i, "LOCALID": i, "STEP_NUM_NODES": "1"
    }.items()}
    for i in "01"
]  # fmt: skip
OPEN_MPI = [
    {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        **{f"OMPI_COMM_WORLD_{name}": value for name, value in {"SIZE": "2", "RANK": i, "LOCAL_RANK": i}.items()},
    }
    for i in "01"
]
# what jax asks Kubernetes' own package for, of a job with two pods
KUBERNETES = """
    import os, sys, types

    def thing(**fields):
        return types.SimpleNamespace(**fields)

    index = os.environ["JOB_COMPLETION_INDEX"]
    owner = thing(controller=True, kind="Job", name="train")
    labels = {"job-name": "train", "batch.kubernetes.io/job-completion-index": index}
    pod = thing(metadata=thing(name="pod", labels=labels, owner_references=[owner], annotations=labels),
                spec=thing(subdomain="jaxpods"))
    job = thing(metadata=thing(name="train", labels={}), spec=thing(completions=2, parallelism=2))
    core = thing(list_namespaced_pod=lambda **_: thing(items=[pod]), list_namespaced_service=lambda *_: thing(items=[]))
    batch = thing(read_namespaced_job=lambda **_: job)
    sys.modules["kubernetes"] = thing(
        config=thing(load_incluster_config=lambda: None),
        client=thing(CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=thing(ApiException=RuntimeError)),
    )
    import socket, jax
    from jax._src.clusters import K8sCluster
    socket.gethostbyname = lambda name: "127.0.0.1"
    K8sCluster._namespace = classmethod(lambda cls: "default")
    K8sCluster.get_coordinator_address = classmethod(
        lambda cls, given=K8sCluster.get_coordinator_address.__func__, **how: given(cls, **how).replace(
            "train-0.jaxpods", "127.0.0.1"))
"""
JOINS = """
    from ipu_jax import popdist

    popdist.init()
    own = popdist.get_instance_index()
    print(own, popdist.get_num_instances(), popdist.all_reduce(own + 1, "sum"))
"""


CONNECTED = """
    import jax

    jax.distributed.initialize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", range(2))
def test_an_instance_of_another_launcher_that_is_alone_says_which_one_is_missing(tmp_path, own):
    (one,) = run_programs(tmp_path, JOINS.replace("init()", "init(timeout=2)"), [SLURM[own]])
    assert one.code == 1
    missing = ("instance 1 of 2 did not join within 2 s", "instance 0 did not answer on 127.0.0.1:61517 within 2 s")
    assert f"InstancesMissingError: {missing[own]}: see" in one.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["SLURM", "SLURM, connected by the program", "Open MPI", "Kubernetes"])
def test_under_other_launchers_the_same_program_needs_none_of_ours(tmp_path, cluster):
    environments = {
        "SLURM": SLURM,
        "SLURM, connected by the program": SLURM,
        "Open MPI": OPEN_MPI,
        "Kubernetes": [
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(i), "HOSTNAME": "pod"} for i in range(2)
        ],
    }[cluster]
    before = {"SLURM, connected by the program": CONNECTED, "Kubernetes": KUBERNETES}.get(cluster, "")
    ended = run_programs(tmp_path, before + JOINS, environments)
    assert [one.code for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert [one.lines for one in ended] == [["0 2 3"], ["1 2 3"]]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", CONNECTED], ids=["not connected", "connected"])
def test_other_flags_are_refused_under_other_launchers_too(tmp_path, before):
    ended = run_programs(tmp_path, before + JOINS, SLURM, arguments=[["--epochs", "2"], ["--epochs", "3"]])
    assert [one.code for one in ended] == [1, 1]
    said = "InstancesDifferError: instance 1 has flags '--epochs 3', instance 0 has '--epochs 2'"
    assert all(said in one.stderr for one in ended)


ALIKE = """
    import sys, time
    from ipu_jax import popdist

    popdist.init()
    if popdist.get_instance_index() == 1:
        time.sleep(1)  # instance 0, which runs jax's service, is the first to fail
    if sys.argv[1] == "raise":
        raise ValueError("a wrong number of layers")
    sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"), [("raise", 1, "ValueError: a wrong number of layers"), ("exit", 7, "")]
)
def test_instances_that_fail_alike_under_other_launchers_each_say_why_and_keep_their_status(tmp_path, how, code, said):
    ended = run_programs(tmp_path, ALIKE, SLURM, arguments=[[how], [how]])
    assert [one.code for one in ended] == [code, code], ended[1].stderr
    assert all(said in one.stderr for one in ended)


@pytest.mark.slow
def test_poprun_goes_before_the_cluster_in_which_it_runs(tmp_path):
    own = [{**one, **SLURM[0], "SLURM_NTASKS": "1"} for one in places(2, run_dir=tmp_path)]
    ended = run_programs(tmp_path, UNCHANGED, own)
    assert [one.lines[-1].split()[:2] for one in ended] == [["0", "2"], ["1", "2"]]
