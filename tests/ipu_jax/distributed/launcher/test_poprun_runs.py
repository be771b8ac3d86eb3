"""Test what poprun starts and shows: environments, tags, bars, files, other hosts, wrong command lines."""

import functools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipu_jax.distributed import poprun as launcher
from ipu_jax.distributed.environment import place_of
from ipu_jax.distributed.launcher.display import Display, OutputWriter
from ipu_jax.distributed.launcher.options import PoprunParser, options_of
from ipu_jax.distributed.launcher.topology import Topology
from support.launched import environment, gone_within, marked, on_a_terminal, poprun, program, start, wait_for

TWO = ("--num-instances", "2", "--num-replicas", "2")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
ENVIRONMENTS = "import json, os; print(json.dumps(dict(os.environ)))"

# Takes the place of ssh: runs the command here. Host "away" cannot be reached.
SHELL = """#!/bin/bash
host=$1; shift
printf "%s\\n" "$*" >> "$0.log"
if [ "$host" = away ]; then echo "ssh: Could not resolve hostname away" >&2; exit 255; fi
echo "Welcome to $host"
export POPRUN_TEST_HOST=$host
exec bash -c "$*"
"""


@pytest.fixture
def shell(tmp_path):
    path = tmp_path / "shell"
    path.write_text(SHELL)
    path.chmod(0o755)
    return str(path)


def environments_of(ran):
    """Return the environment of each instance."""
    assert ran.status == 0, ran.err
    found = {}
    for line in ran.out.splitlines():
        tag, _, text = line.partition(":")
        found[int(tag[3])] = json.loads(text)
    return [found[i] for i in sorted(found)]


def test_each_instance_has_its_place_its_threads_its_cache_and_the_bootstrap(tmp_path):
    cache = tmp_path / "new" / "cache"
    words = ("--num-replicas", "4", "--num-instances", "2", "--ipus-per-replica", "2", "-x", "MINE=a b")
    words += ("--executable-cache-path", str(cache))
    found = environments_of(poprun(*words, sys.executable, "-c", ENVIRONMENTS))
    places = [place_of(variables) for variables in found]
    assert [place.instance for place in places if place] == [0, 1]
    assert [place.local_ipus for place in places if place] == [4, 4]
    assert len({place.coordinator for place in places if place}) == 1
    assert places[0] is not None
    host, port = places[0].coordinator.split(":")
    assert (host, places[0].bind) == ("127.0.0.1", f"127.0.0.1:{port}")
    cores = len(os.sched_getaffinity(0))
    assert [int(variables["PJRT_NPROC"]) for variables in found] == [4 + max(1, cores // 2)] * 2
    assert {variables["MINE"] for variables in found} == {"a b"}
    (token,) = {variables["IPU_JAX_RUN_TOKEN"] for variables in found}
    assert re.fullmatch("[0-9a-f]{32}", token)
    for i, variables in enumerate(found):
        assert variables["JAX_COMPILATION_CACHE_DIR"] == str(cache / f"instance-{i}")
        assert variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
        assert variables["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] == "-1"
        assert variables["PYTHONPATH"].split(os.pathsep)[0].endswith("ipu_jax/distributed/bootstrap")
        assert not Path(variables["IPU_JAX_RUN_DIR"]).exists()  # it is gone with the run
    assert cache.is_dir()


@pytest.fixture
def dry(monkeypatch, capfd):
    """Return a function that returns what a command line would start, as text, and what is said of it."""
    monkeypatch.setattr(launcher, "Signals", lambda: SimpleNamespace(wait=lambda *_: []))

    def of(*words):
        assert launcher.main(["--dry-run", *words, "true"]) == 0
        return capfd.readouterr()

    return of


@pytest.fixture
def planned(dry):
    """Return a function that returns the variables of each instance that a command line would start."""

    def of(*words):
        lines = [shlex.split(line) for line in dry(*words).out.splitlines() if line.startswith("cd ")]
        return [dict(word.split("=", 1) for word in line if "=" in word) for line in lines]

    return of


def test_each_instance_has_the_devices_of_its_ipus_and_axes_of_an_outer_run_do_not_reach_it(planned, monkeypatch):
    words, names = ("-n", "2", "--ipus-per-replica", "2"), ("IPU_JAX_AXES", "JAX_NUM_CPU_DEVICES")
    for flags, expected in ((("--axes", "tensor=2,context=3"), ("tensor=2,context=3", "12")), ((), (None, "2"))):
        assert [tuple(own.get(name) for name in names) for own in planned(*words, *flags)] == [expected] * 2
    parser = PoprunParser()
    options = options_of(parser, parser.parse(list(words)), ["true"])
    monkeypatch.setattr(os, "environ", {"IPU_JAX_AXES": "outer=2", "HOME": "/"})
    inherited = launcher._environment(options, True, None)
    assert (inherited.get("IPU_JAX_AXES"), inherited["HOME"]) == (None, "/")


@pytest.mark.parametrize(
    ("words", "replicas"),
    [((), 1), (("-n", "3"), 3), (("-n3",), 3), (("--num-instances", "2"), 2), (("-n", "2", "--num-replicas", "4"), 4)],
)
def test_each_instance_has_a_replica_unless_there_are_more(planned, words, replicas):
    assert {own["POPDIST_NUM_TOTAL_REPLICAS"] for own in planned(*words)} == {str(replicas)}


def test_lines_have_tags_and_go_where_they_were_written():
    script = "echo out; echo err >&2; printf 'a\\r\\nno end'; printf '\\xff\\n' >&2"
    ran = poprun(*TWO, "bash", "-c", script)
    assert ran.status == 0
    lines = sorted(f"[1,{i}]<stdout>:{text}" for i in (0, 1) for text in ("out", "a", "no end"))
    assert sorted(ran.out.split("\n")) == ["", *lines]
    lines = sorted(f"[1,{i}]<stderr>:{text}" for i in (0, 1) for text in ("err", "\udcff"))
    assert sorted(ran.err.split("\n")) == ["", *lines]


@pytest.mark.parametrize(
    ("flags", "tag"),
    [
        (("--tag-output",), "[1,{}]<stdout>:"),
        (("--tag-output=yes",), "[1,{}]<stdout>:"),
        (("--tag-output", "short"), "[{}] "),
        (("--tag-output", "off"), ""),
        (("--tag-output=no", "--timestamps"), "[{time}] "),
        (("--tag-output=SHORT", "--timestamps"), "[{}][{time}] "),
    ],
)
def test_a_tag_can_be_short_or_left_out(flags, tag, capfd):
    parser = PoprunParser()
    options = options_of(parser, parser.parse(["-n", "2", *flags]), ["true"])
    display = Display(OutputWriter(), only=None, tags=options.tag_output, timestamps=options.timestamps, folder=None)
    display.begin(0)
    for i in (0, 1):
        display.show(i, "stdout", b"of %d\nrest" % i)
        display.show(i, "stdout", b"")
    assert display.writer.close(60)
    found = re.sub(r"\d\d:\d\d:\d\d\.\d{3}", "TIME", capfd.readouterr().out)
    assert found.splitlines() == [tag.format(i, time="TIME") + text for i in (0, 1) for text in (f"of {i}", "rest")]


def test_only_stdout_of_one_instance_and_stderr_of_all():
    script = "echo out; echo err >&2; exit $IPU_JAX_INSTANCE"
    ran = poprun(*TWO, "--only-output-from-instance", "0", "bash", "-c", script)
    assert (ran.status, ran.out) == (1, "[1,0]<stdout>:out\n")
    assert "[1,0]<stderr>:err\n" in ran.err
    assert "[1,1]<stderr>:err\n" in ran.err
    assert ran.err.endswith("exited with status 1\npoprun:   its last lines:\npoprun:     out\n")  # they were hidden


def test_files_and_times(tmp_path):
    words = ("--output-dir", str(tmp_path / "logs"), "--timestamps", *TWO)
    ran = poprun(*words, "bash", "-c", "printf 'a\\rb\\n'; echo c >&2")
    assert re.fullmatch(r"(\[1,[01]\]<stdout>\[\d\d:\d\d:\d\d\.\d{3}\]:(a|b)\n){2,4}", ran.out)
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.std*")}
    assert files == {
        f"logs/attempt-0/instance-{i}.{stream}": text
        for i in (0, 1)
        for stream, text in (("stdout", b"a\rb\n"), ("stderr", b"c\n"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "removed", "file of an attempt"])
def test_files_that_cannot_be_opened_are_said_once_and_the_run_goes_on(tmp_path, kind):
    logs = tmp_path / "logs"
    body = f"""
    import shutil
    if attempt == 0 and me == 0:
        shutil.rmtree({str(logs)!r})
        if {kind!r} == "file":
            Path({str(logs)!r}).touch()
        elif {kind!r} == "file of an attempt":
            os.mkdir({str(logs)!r})
            Path({str(logs)!r}, "attempt-1").touch()
    meet(0), print("out", me, flush=True), print("err", me, file=sys.stderr, flush=True), meet(1)
    step(2)
    sys.exit(5 if attempt == 0 else 0)
    """
    ran = poprun("--max-restarts", "1", "--output-dir", str(logs), *TWO, *program(tmp_path, body))
    assert ran.status == 0, ran.err
    assert ran.out.count(">:out ") == 4
    said = re.findall(r"poprun: (.*)/attempt-(\d) cannot be written \((.*)\): the run goes on without it\n", ran.err)
    reason = "File exists" if kind == "file of an attempt" else "Not a directory"
    attempts = {"file": ["0", "1"], "removed": [], "file of an attempt": ["1"]}[kind]
    assert said == [(str(logs), attempt, reason) for attempt in attempts]


@pytest.mark.parametrize("flag", ["--dry-run", slow("--offline-mode")])
def test_the_printed_commands_can_be_run_and_are_no_others_whatever_the_names(tmp_path, flag):
    folder, argument = tmp_path / "a\necho other #", "x\necho other #'\udcff"
    folder.mkdir()
    code = "import os, sys; print(os.environ['IPU_JAX_INSTANCE'], os.getcwd(), sys.argv)"
    ran = poprun(flag, *TWO, sys.executable, "-c", code, argument, cwd=folder)
    assert (ran.status, ran.err) == (0, "")
    words = ["bash", "-c", os.fsencode(ran.out)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd="/", check=True)
    assert done.stdout == "".join(f"{i} {folder} {['-c', argument]}\n" for i in range(2))


def test_numa_awareness_says_what_it_does():
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    ran = poprun("--numa-aware", *TWO, sys.executable, "-c", code)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        bound = [json.loads(line.partition(":")[2]) for line in sorted(ran.out.splitlines())]
        assert sorted(core for share in bound for core in share) == cores
    assert ran.err.startswith("poprun: --numa-aware: ")
    many = len(cores) + 1
    said = launcher._about_nodes(Topology(("localhost",), many, many, 1))
    assert f"{many} instances have {len(cores)} cores: they share all of them, and none is bound" in said


def test_the_topology_is_drawn_first_and_options_of_the_original_without_effect_are_said_once(dry):
    words = ("--vipu-partition=p", "--update-partition=no", "--reset-partition", "--mpi-global-args", "--tag-output")
    out, err = dry("--print-topology", *words, *TWO)
    assert out.startswith("poprun topology: ")
    assert "  localhost  instances 0-1  " in out.split("# on host")[0]
    said = err.splitlines()
    assert sorted(line.split()[1] for line in said) == ["--mpi-global-args", "--reset-partition", "--vipu-partition"]
    assert all(" has no effect: " in line for line in said)


def test_a_given_port_that_is_taken_is_refused_at_once():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = poprun("--coordinator-port", str(port), *TWO, "echo", "started")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (
        f"poprun: port {port} of 127.0.0.1 on localhost cannot be used: Address already in use: "
        "give another --coordinator-port or -bind\n"
    )


# Meets as popdist.init does, without jax, and after a while.
MEETS = """
from ipu_jax.distributed._rendezvous import meet
from ipu_jax.distributed.environment import place_of
import socket
place = place_of(os.environ)
while not Path(os.environ["LATE"]).exists():
    time.sleep(0.02)
meet(place, {"flags": "alike"}, seconds=60)
if me == 0:
    service = socket.create_server(("127.0.0.1", int(place.bind.partition(":")[2])))
    time.sleep(0.5)
print("met", flush=True)
"""


def test_of_two_runs_with_one_port_the_second_is_refused_and_the_first_goes_on(tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    late, command = tmp_path / "late", program(tmp_path, MEETS)
    first = start("-v", "--coordinator-port", port, *TWO, *command, LATE=str(late))
    try:
        assert first.stderr is not None
        while "instance 1 pid" not in first.stderr.readline():
            pass
        second = poprun("--coordinator-port", port, *TWO, *command, LATE=str(late))  # nobody listens there yet
        late.touch()
        out, err = first.communicate(timeout=60)
    finally:
        first.kill()
    assert (second.status, second.out) == (2, "")
    mend = "give another --coordinator-port or -bind"
    assert second.err == f"poprun: port {port} on localhost belongs to another run of poprun: {mend}\n"
    assert (first.returncode, sorted(out.splitlines())) == (0, ["[1,0]<stdout>:met", "[1,1]<stdout>:met"]), err


def test_a_run_has_a_token_that_no_command_line_shows(shell, planned):
    words = ("--max-restarts", "1", "--remote-shell", shell, "--host", "near,far", *TWO)
    ran = poprun("-v", *words, "bash", "-c", 'echo "$IPU_JAX_ATTEMPT $IPU_JAX_RUN_TOKEN"; sleep 1; exit 3')
    found = [line.partition(":")[2].split() for line in ran.out.splitlines()]
    assert len(found) == 4
    first, second = ({token for number, token in found if number == attempt} for attempt in "01")
    assert (len(first), len(second), len(first | second)) == (1, 1, 2)
    shown = ran.err + str(planned(*words)) + Path(f"{shell}.log").read_text()
    assert "IPU_JAX_RUN_TOKEN" not in shown
    assert not any(token in shown for token in first | second)


@pytest.mark.parametrize(
    ("towards", "bind", "expected"),
    [
        ({"b": "10.0.0.5", "c": "10.0.0.5"}, None, ("10.0.0.5", "10.0.0.5")),
        ({"b": "10.0.0.5", "c": "192.168.1.5"}, None, ("here", "[::]")),  # no one address reaches all
        ({"b": "10.0.0.5", "c": None}, None, ("here", "[::]")),
        ({"b": "10.0.0.5", "c": "10.0.0.5"}, "0.0.0.0", ("here", "0.0.0.0")),
        ({"b": "10.0.0.5", "c": "10.0.0.5"}, "10.9.9.9", ("10.9.9.9", "10.9.9.9")),
    ],
)
def test_the_coordinator_listens_on_the_address_that_the_other_hosts_reach(monkeypatch, towards, bind, expected):
    monkeypatch.setattr(launcher, "_address_towards", towards.__getitem__)
    words = ["--host", "localhost,b,user@c", "--num-instances", "3", "--num-replicas", "3"]
    words += ["--coordinator-bind", bind] if bind else []
    parser = PoprunParser()
    options = options_of(parser, parser.parse(words), ["true"])
    topology = Topology(options.host, 3, 3, 1)
    assert launcher._coordinator(options, topology, [True, False, False], ("here",)) == expected


@pytest.mark.parametrize("shell", ["ssh '", "''"])
def test_a_remote_shell_of_the_environment_is_refused_like_one_of_the_command_line(shell, monkeypatch, capsys):
    for words, variable, source in (
        (["--remote-shell", shell], "ssh", "argument --remote-shell"),
        ([], shell, "POPRUN_REMOTE_SHELL"),
    ):
        monkeypatch.setenv("POPRUN_REMOTE_SHELL", variable)
        with pytest.raises(SystemExit) as stopped:
            launcher.main([*words, "--host", "far", "true"])
        assert stopped.value.code == 2
        rule = f"{shell!r} is not a command: close its quotes, and give one such as ssh or 'ssh -p 2222'"
        assert capsys.readouterr() == ("", f"poprun: {source}: {rule}\n")


TO_START_IT = "is not executable: make it so with chmod +x, or start it with: python"


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ("no-such-program", 127, "there is no program 'no-such-program': give one in PATH, or its path"),
        ("./train.py", 126, f"./train.py {TO_START_IT} ./train.py"),
        ("train.py", 126, f"train.py {TO_START_IT} train.py"),
        (".", 127, "there is no program '.': give one in PATH, or its path"),
        ("", 2, "no program is given: name one after the options, such as: poprun --num-instances 2 python train.py"),
        (
            "-x IPU_JAX_RUN_TOKEN=1 true",
            2,
            "argument -x: poprun sets IPU_JAX_RUN_TOKEN itself, by instance: leave it out",
        ),
        (
            *("--num-replica 2 true", 2),
            "unrecognized arguments: --num-replica: did you mean --num-replicas? --help lists all flags",
        ),
        ("--output-dir . true", 2, "argument --output-dir: {folder} has files of another run: give another folder"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path, words, status, line, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "attempt-0").mkdir()
    with pytest.raises(SystemExit) as stopped:
        launcher.main(words.split())
    assert (stopped.value.code, *capsys.readouterr()) == (status, "", f"poprun: {line.format(folder=tmp_path)}\n")


def test_other_hosts_run_their_instances(tmp_path, shell):
    body = """
    print(os.environ["POPRUN_TEST_HOST"], os.environ["POPDIST_LOCAL_INSTANCE_INDEX"], os.getcwd(), os.environ["MINE"])
    for n in range(5):
        (Path(os.environ["MEET"]) / f"{n}.{me}").touch()
        step_alone = beacon.begun(), beacon.finished()
    """
    words = ("-v", "--remote-shell", shell, "--host", "pod[0-1]", "--num-instances", "4", "--num-replicas", "4")
    ran = poprun(*words, "-x", "MINE=x y", "-x", f"MEET={tmp_path}", *program(tmp_path, body), cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert sorted(ran.out.splitlines()) == [f"[1,{i}]<stdout>:pod{i // 2} {i % 2} {tmp_path} x y" for i in range(4)]
    assert re.search(r"coordinator pod0:\d+", ran.err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 124, "the process is in state T (stopped)"),
        ("write_error(ValueError('far')); os._exit(4)", 4, "failed with ValueError: far (exit status 4)"),
    ],
)
def test_what_happens_on_another_host_is_seen_as_well(tmp_path, shell, how, status, said):
    body = f"""
    for n in range(1000):
        if me == 1 and n == 6:
            {how}
        beacon.begun(); time.sleep(0.02); beacon.finished()
        if me == 0 and n == 6:
            time.sleep(600)
    """
    ran = poprun("--remote-shell", shell, "--host", "near,far", *TWO, *program(tmp_path, body), POPRUN_TEST="far" + how)
    assert ran.status == status
    assert "instance 1 (host far, pid" in ran.err
    assert said in ran.err
    assert marked("far" + how) == set()


def test_a_host_that_cannot_be_reached_is_one_line_and_nothing_is_started(tmp_path, shell):
    ran = poprun("--remote-shell", shell, "--host", "near,away", *TWO, "touch", str(tmp_path / "started"))
    assert (ran.status, ran.out) == (255, "")
    assert ran.err == "poprun: host away: cannot be reached: ssh: Could not resolve hostname away\n"
    assert not (tmp_path / "started").exists()


def test_a_host_that_is_lost_is_reached_again_by_a_restart_or_ends_the_run(shell):
    script = "echo $IPU_JAX_ATTEMPT; test $IPU_JAX_INSTANCE = 0 || { sleep 0.5; kill -9 $PPID; }; sleep 600"
    words = ("--max-restarts", "1", "--remote-shell", shell, "--host", "near,far")
    ran = poprun(*words, *TWO, "bash", "-c", script, POPRUN_TEST="lost")
    assert ran.status == 255
    assert "restart 1 of 1" in ran.err
    assert ran.err.count("poprun: host far: the connection was closed") >= 2
    assert {f"[1,1]<stdout>:{attempt}" for attempt in "01"} <= set(ran.out.splitlines())
    assert marked("lost") == set()


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_nothing_is_left_on_other_hosts_when_poprun_is_killed(shell):
    process = start("--remote-shell", shell, "--host", "near,far", *TWO, "sleep", "600", POPRUN_TEST="killed")
    wait_for(lambda: sum(b"sleep" in command_of(pid) for pid in marked("killed")) == 2)
    process.kill()
    process.communicate()
    gone_within("killed")


def test_a_bar_on_a_terminal_stays_on_its_row(tmp_path):
    """Each instance goes on when the terminal shows what was written."""
    body = f"""
    def seen(text):
        while not Path({str(tmp_path)!r}, text).exists():
            time.sleep(0.01)
    for n in range(2):
        me or print(f"\\r {{n}} of 1", end="", file=sys.stderr, flush=True)
        seen(f"{{n}} of 1")
    if me == 1:
        print("a line", os.environ["COLUMNS"], flush=True)
    seen("a line")
    me or print(file=sys.stderr)
    """
    texts = ("0 of 1", "1 of 1", "a line")
    look = lambda shown: [(tmp_path / text).touch() for text in texts if text.encode() in shown]
    status, text = on_a_terminal(*TWO, *program(tmp_path, body), look=look)
    tag, clear = r"\[1,0\]<stderr>: ", r"\r\x1b\[K"
    assert status == 0
    drawn = rf"\r{tag}0 of 1{clear}\r{tag}1 of 1{clear}\[1,1\]<stdout>:a line \d+\n\r{tag}1 of 1{clear}{tag}1 of 1\n"
    assert re.fullmatch(drawn, text)
