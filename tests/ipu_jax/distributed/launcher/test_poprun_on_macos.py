"""Test poprun without what only Linux has: os.waitid, binding to cores, /proc. Its instances have all of it."""

import subprocess
import sys

import pytest

from support.launched import ROOT, environment, gone_within, program

POPRUN = "from support import like_macos; like_macos.hide(); from ipu_jax.distributed import poprun; poprun.command()"


def poprun(*words, **variables):
    command = [sys.executable, "-W", "error", "-c", POPRUN, *words]
    own = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", **variables)
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)


def test_two_instances_run_to_their_end(tmp_path):
    words = ("--num-instances", "2", "--numa-aware", "--print-topology")
    ran = poprun(*words, *program(tmp_path, "[step(n) for n in range(3)]; print('done', me)"))
    assert ran.returncode == 0
    assert sorted(ran.stdout.splitlines()[2:]) == ["[1,0]<stdout>:done 0", "[1,1]<stdout>:done 1"]
    assert ran.stderr == "poprun: --numa-aware: this system cannot bind a process to cores: none is bound\n"


@pytest.mark.fast("killed")
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "last finished step 2) was ended by SIGKILL"),
        ("write_error(ValueError('no')), sys.exit(3)", 3, "failed with ValueError: no (exit status 3)"),
        ("time.sleep(600)", 124, "is stuck: it finished no step for 10"),
    ],
    ids=["killed", "raises", "stuck"],
)
def test_an_instance_that_fails_is_named_and_all_are_ended(tmp_path, mark, end, status, said):
    body = f"""
    subprocess.Popen(["sleep", "600"])  # of the same process group
    for n in range(1000):
        if me == 1 and n == 2:
            {end}
        step(n)
    """
    ran = poprun("-n", "2", "--stall-timeout", "10", *program(tmp_path, body), POPRUN_TEST=mark)
    assert ran.returncode == status
    assert "poprun: instance 1 (host localhost, pid " in ran.stderr
    assert said in ran.stderr
    gone_within(mark)
