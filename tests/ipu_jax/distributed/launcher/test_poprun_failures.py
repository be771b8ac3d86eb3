"""Test that a dead, failing or stuck instance is found in time and named, and that nothing is left behind."""

import functools
import re
import shlex
import signal

import pytest

from ipu_jax.distributed.launcher.causes import cause_of
from support.launched import gone_within, marked, poprun, program

TWO = ("-v", "--num-instances", "2", "--num-replicas", "2")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("victim", [slow(0), 1])
def test_a_killed_instance_is_named_and_all_are_gone(tmp_path, mark, victim):
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # survivors may be stuck, for ever
    for n in range(9):
        if me == {victim} and n == 7:
            print(f"killed={{time.monotonic()}}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        step(n)
    """
    ran = poprun(*TWO, *program(tmp_path, body), POPRUN_TEST=mark)
    assert ran.status == 128 + signal.SIGKILL
    assert ran.seen(f"instance {victim} was ended by SIGKILL") >= ran.stamp("killed")
    assert ran.ended - ran.stamp("killed") < 25, "30 s are left only after a signal of the user's"
    assert marked(mark) == set()
    last = ran.err.splitlines()[-1]
    assert last.startswith(f"poprun: instance {victim} (host localhost, pid ")
    assert "last finished step 7) was ended by SIGKILL" in last


@pytest.mark.fast("compiling")
@pytest.mark.parametrize(
    ("words", "body", "said"),
    [
        (
            *(("--compile-timeout", "1"), "beacon.enter(beacons.Phase.COMPILING)"),
            ("is stuck: ", "the limit is 1 s (--compile-timeout)"),
        ),
        (
            ("--stall-timeout", "10"),
            "step(0), step(1), me or beacon.begun(), me and sys.exit()",  # does its step need the other one?
            (
                "instance 0 (host",
                "(--stall-timeout)",
                "of the other instances, 1 had exited with status 0: it may have waited for them",
            ),
        ),
    ],
    ids=["compiling", "stepping"],
)
def test_what_an_instance_does_is_bounded_by_an_option(tmp_path, words, body, said):
    ran = poprun(*words, *TWO, *program(tmp_path, f"{body}; time.sleep(600)"))
    assert ran.status == 124
    assert [text for text in said if text not in ran.err] == [], ran.err


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--flight-recorder",), ()])
def test_what_each_ipu_does_is_said_of_a_stuck_run_with_a_flight_recorder(tmp_path, words):
    body = """
    from ipu_jax.distributed.processes import flight
    report = flight.report_of("p", "training", 1, lambda: [["F of 0", "F of 1", ""], ["F of 0", "F of 1", "F of 2"]])
    step(0); step(1)
    if report:
        report(0, me, 2 - me)  # instance 1 holds the others up
    meet(2); time.sleep(0.1 * me); beacon.finished(0)
    beacon.begun(); time.sleep(600)
    """
    ran = poprun(*words, *TWO, "--stall-timeout", "10", *program(tmp_path, body))
    assert ran.status == 124
    said = re.findall(r"what the IPUs of instance (\d) do:\npoprun:     (.*), for [\d.]+ s\n", ran.err)
    expected = [("0", "IPU 0 of replica 0: idle in tick 2 of 3"), ("1", "IPU 1 of replica 0: F of 1, tick 1 of 3")]
    assert said == (expected if words else [])
    # the record knows better than the times of the last steps
    assert f"poprun: instance {1 if words else 0} (host localhost" in ran.err


# as gloo and jax 0.10.2 print them
CAUSES = {
    "  what():  [enforce fail at external/gloo/gloo/transport/tcp/pair.cc:459] op.preamble.length <= op.nbytes. 192 vs "
    "128. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?": (
        "it received arrays of another size than it sent"
    ),
    "jax.errors.JaxRuntimeError: UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed "
    "out with key: cpu:gloo/0,2048/0 and duration: 29.99999991s": "another instance did not reach their exchange",
    "UNAVAILABLE: /job:jax_worker/replica:0/task:1 heartbeat timeout. This indicates that the remote task has failed, "
    "got preempted, or crashed unexpectedly.": "jax's service has missed the heartbeats",
}


@pytest.mark.parametrize("line", CAUSES)
def test_what_gloo_or_jax_has_said_is_told_in_words(line):
    assert cause_of(["before", line, "after"]).startswith(CAUSES[line])


@pytest.mark.parametrize("teller", [slow(0), 1])
def test_a_cause_is_told_of_an_instance_that_a_signal_has_ended_whichever_has_said_it(tmp_path, teller):
    line, cause = next(iter(CAUSES.items()))
    body = f"""
    step(0)
    if me == {teller}:
        print({line!r}, file=sys.stderr)
    if me == 0:
        os.kill(os.getpid(), signal.SIGABRT)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGABRT)
    """
    ran = poprun(*TWO, *program(tmp_path, body))
    assert ran.status == 128 + signal.SIGABRT
    assert f" was ended by SIGABRT: {cause}" in ran.err


@pytest.mark.slow
def test_no_cause_is_told_of_a_failure_of_its_own(tmp_path):
    ran = poprun(
        *TWO, *program(tmp_path, f"print({next(iter(CAUSES))!r}, file=sys.stderr); me or sys.exit(3); meet(2)")
    )
    assert ran.status == 3
    assert ran.err.splitlines()[-1].endswith("exited with status 3")


# Instance 0 ends its program with status 0; instance 1 goes on. `joint` steps need both.
EARLY = """
def joint(n):
    beacon.begun(joint=True); beacon.dispatched(); meet(n); time.sleep(0.05); beacon.finished()
def end(at_once=False):
    print(f"ended={time.monotonic()}", flush=True)
    if not at_once:
        beacon.enter(beacons.Phase.ENDING)
        time.sleep(600)  # for the others
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[joint(n) for n in range(5 + me * 9)]; end()", "after step 5, while instance 1 still trains, in step 6"),
        slow(
            "beacon.begun(joint=True); beacon.enter(beacons.Phase.COMPILING); me or end(True); time.sleep(600)",
            "with status 0 before its first step had finished, while instance 1 still compiles step 1",
        ),
    ],
    ids=["it trains", "it compiles"],
)
def test_an_instance_that_ends_early_is_named(tmp_path, mark, body, said):
    ran = poprun(*TWO, *program(tmp_path, EARLY + body), POPRUN_TEST=mark)
    assert ran.status == 1
    assert ran.seen("stopping [12] instances") >= ran.stamp("ended")
    assert marked(mark) == set()
    assert re.search(
        rf"poprun: instance 0 \(host localhost, pid \d+\) ended its program {re.escape(said)}\n"
        "poprun:   all instances must make the same steps and calls: look for what ends one of them early, such as "
        r"fewer examples on its host, or os\._exit\n",
        ran.err,
    ), ran.err
    assert "instance 1 (host" not in ran.err


@pytest.mark.parametrize(
    ("fail", "failed"),
    [
        ('write_error(RuntimeError("Gloo: Connection closed by peer")); os._exit(7)', "(exit status 7)"),
        slow("os.abort()", "was ended by SIGABRT"),  # by jax's service
    ],
)
def test_an_exit_with_0_that_costs_another_one_its_connection_is_named_first(tmp_path, fail, failed):
    body = """
    beacon.begun(joint=True); beacon.dispatched(); meet(0)
    if me == 1:
        os._exit(0)
    time.sleep(0.5)
    {fail}
    """
    ran = poprun(*TWO, *program(tmp_path, body.format(fail=fail)))
    assert ran.status == 1
    end, mend, consequence = [line for line in ran.err.splitlines() if "(host" in line or "look for" in line]
    assert "instance 1 (host localhost, pid " in end
    assert "ended its program with status 0 before its first step had finished, while instance 0 still needs it" in end
    assert "all instances must make the same steps and calls" in mend
    assert "instance 0 (host localhost, pid " in consequence
    assert failed in consequence


AT_IMPORT = "with record.meeting('in popdist.init', 600): time.sleep(600)"


def test_an_instance_that_ends_before_it_has_a_beacon_is_named(tmp_path):
    command = shlex.join(program(tmp_path, AT_IMPORT))
    ran = poprun(*TWO, "bash", "-c", f"test $IPU_JAX_INSTANCE = 1 && exit 0; exec {command}")
    assert ran.status == 1
    assert "ended its program with status 0 before its first step had finished" in ran.err
    assert "while instance 0 still waits in popdist.init" in ran.err


def test_an_instance_that_hangs_before_it_has_a_beacon_is_named_after_the_start_timeout(tmp_path, mark):
    command = shlex.join(program(tmp_path, AT_IMPORT))
    hangs = f"test $IPU_JAX_INSTANCE = 1 && sleep 600; exec {command}"
    ran = poprun("--start-timeout", "1", *TWO, "bash", "-c", hangs, POPRUN_TEST=mark)
    assert ran.status == 124
    assert re.search(
        r"poprun: instance 1 \(host localhost, pid \d+, no step is known\) is stuck: it has not reached popdist.init, "
        r"where others have waited for [\d.]+ s; the limit is 1 s \(--start-timeout\)\n",
        ran.err,
    ), ran.err
    assert marked(mark) == set()


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
        ("write_error(ValueError('mine')), os._exit(9)", 9, "failed with ValueError: mine (exit status 9)"),
    ],
)
def test_a_failure_that_is_seen_a_moment_later_is_blamed_for_a_lost_connection(tmp_path, how, status, said):
    body = f"""
    meet(0)
    if me == 1:
        time.sleep(0.05)
        {how}
    write_error(RuntimeError("Gloo: Connection closed by peer"))
    os._exit(1)
    """
    ran = poprun(*TWO, *program(tmp_path, body))
    assert ran.status == status
    assert re.match(rf"poprun: instance 1 .*{re.escape(said)}$", ran.err.splitlines()[-1])


def test_an_exception_is_told_even_if_its_program_takes_its_time_to_end(tmp_path):
    body = """
    if me == 0:
        error = ValueError("mine")
        write_error(error)
        beacon.enter(beacons.Phase.FAILED, "ValueError")
        (run_dir / "failed").touch()
        time.sleep(600)
    while not (run_dir / "failed").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    write_error(KeyError("yours"))
    os._exit(4)
    """
    ran = poprun(*TWO, *program(tmp_path, body))
    assert ran.status == 1
    assert ran.err.splitlines()[-1].startswith("poprun: instance 0 ")
    assert ran.err.endswith("failed with ValueError: mine\n")


def test_a_shell_in_between_changes_nothing(tmp_path, mark):
    command = shlex.join(program(tmp_path, "time.sleep(600) if me else os._exit(5)"))
    ran = poprun(*TWO, "bash", "-c", f"sleep 600 & {command}; exit $?", POPRUN_TEST=mark)
    assert ran.status == 5
    assert marked(mark) == set()


def test_of_a_program_that_ends_well_no_exception_is_believed_and_no_process_is_left(tmp_path, mark):
    body = """
    write_error(ValueError('handled'))
    subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    """
    ran = poprun(*TWO, *program(tmp_path, body), POPRUN_TEST=mark)
    assert (ran.status, ran.out) == (0, "")
    assert "handled" not in ran.err
    gone_within(mark)


def test_a_foreign_program_is_supervised_by_its_exit_alone(mark):
    ran = poprun(*TWO, "bash", "-c", "echo it >&2; test $IPU_JAX_INSTANCE = 0 || exit 3; sleep 600", POPRUN_TEST=mark)
    assert ran.status == 3
    assert "it had no beacon, so that only its exit was supervised" in ran.err
    assert "instance 1 (host localhost, pid" in ran.err
    assert marked(mark) == set()


# what is tried again; poprun says little of it


FAILS_TWICE = """
    print(f"port={os.environ['JAX_COORDINATOR_ADDRESS']}", flush=True)
    for n in range(3):
        step(n)
    sys.exit(5 if attempt < 2 and me == 0 else 0)
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "body", "status", "restarts", "last"),
    [
        (4, FAILS_TWICE, 0, 2, "attempt 2: restart 2 of 4"),
        slow(1, FAILS_TWICE, 5, 1, "no restart is left: --max-restarts 1"),
        slow(9, "sys.exit(6)", 6, 3, "3 restarts in a row have finished no step: there is no other"),
    ],
)
def test_restarts_have_new_ports_and_end_when_it_works_or_none_is_left(tmp_path, most, body, status, restarts, last):
    ran = poprun("--max-restarts", str(most), *TWO[1:], *program(tmp_path, body))
    assert ran.status == status
    numbers = re.findall(rf"poprun: attempt (\d): restart (\d) of {most}\n", ran.err)
    assert numbers == [(str(n), str(n)) for n in range(1, restarts + 1)]
    assert ran.err.endswith(f"poprun: {last}\n")
    assert body != FAILS_TWICE or len(set(re.findall(r"port=(\S+)", ran.out))) == 1 + restarts


@pytest.mark.parametrize("status", [2, slow(127)])
def test_a_wrong_command_line_of_the_program_is_not_tried_again(status):
    ran = poprun("--max-restarts", "9", *TWO[1:], "bash", "-c", f"exit {status}")
    assert ran.status == status
    assert "restart" not in ran.err


def test_a_port_that_was_taken_meanwhile_is_no_failure_once(tmp_path):
    body = """
    if me == 0:
        class PortTakenError(OSError): pass
        write_error(PortTakenError("127.0.0.1:1 is taken"))
        os._exit(1)
    """
    ran = poprun(*TWO[1:], *program(tmp_path, body))
    assert (ran.status, ran.err.count("another port")) == (1, 1)
    assert "attempt 1: another port, since the coordinator's was taken in the meantime" in ran.err
