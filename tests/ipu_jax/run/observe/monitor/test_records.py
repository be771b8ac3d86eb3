"""Test which records ipu-monitor finds, ignores and removes, with processes that live, are killed, or never were."""

import json
import os
import stat
import subprocess
import sys

import psutil
import pytest

from ipu_jax.distributed.processes.identity import Identity, is_living, own_identity
from ipu_jax.run.observe.monitor import records
from support.launched import recorded


@pytest.fixture
def own():
    identity = own_identity()
    assert identity is not None
    return identity


find = lambda own: records.find(own, {})


def test_a_process_is_found_while_it_lives_and_its_files_are_removed_when_it_was_killed(folder, own):
    assert find(own) == ([], [])  # there may be no folder
    with recorded(folder, "beacon.finished(2, 6, 60)") as running:
        (record,), ignored = find(own)
        assert ignored == []
        assert (record.identity.pid, record.process.pid, record.said.run) == (running.pid, running.pid, None)
        assert record.said.command[-2:] == ("some", "words")
        assert record.uid == os.getuid()
        assert record.reading is not None
        assert (record.reading.updates, record.reading.samples) == (6, 60)
        assert len(list(folder.iterdir())) == 1
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert stat.S_ISDIR(os.stat(f"/proc/{running.pid}").st_mode)  # a zombie
        assert find(own) == ([], [])
        assert list(folder.iterdir()) == []


def test_another_process_with_the_same_number_is_not_taken_for_it(folder, own):
    with recorded(folder) as running:
        (record,), _ = find(own)
        (path,) = folder.iterdir()
        path.rename(folder / str(record.identity._replace(start=record.identity.start - 1)))
        assert find(own) == ([], [])
        assert list(folder.iterdir()) == []
        assert running.poll() is None


def write(folder, identity, content=b"{}", beacon=bytes(4096)):
    path = folder / str(identity)
    for made in (folder, path):
        made.mkdir(mode=0o700, exist_ok=True)
    (path / "beacon").write_bytes(beacon)
    (path / "said.json").write_bytes(content)
    return path


@pytest.mark.parametrize("change", [{"boot": "00000000"}, {"namespace": 1}])
def test_another_containers_or_hosts_record_is_left_alone(folder, own, change):
    path = write(folder, own._replace(pid=4194304, **change))
    found, (ignored,) = find(own)
    assert (found, ignored.path) == ([], str(path))
    assert "another container or host" in ignored.reason
    assert path.exists()


def valid(own, **changes):
    values = {
        "format": 3, "command": ["train"], "run": None, "instance": 0, "instances": 1, "replicas": None,
        "ipus_per_replica": None, "ipus": [{"id": 0, "platform": "cpu", "kind": "cpu"}],
    }  # fmt: skip
    return json.dumps({**values, **changes}).encode()


@pytest.mark.parametrize("beacon", [bytes(4096), b"IPUB\x01\0\0\0" + bytes(4088)])
def test_what_tells_of_no_mesh_and_has_no_beacon_is_a_record_nonetheless(folder, own, beacon):
    write(folder, own, valid(own), beacon)
    (record,), ignored = find(own)
    assert (record.reading, record.said.replicas, record.said.ipus[0].stages, ignored) == (None, None, (), [])


@pytest.mark.parametrize("missing", ["beacon", "said.json"])
def test_one_that_is_just_being_begun_is_none_yet(folder, own, missing):
    (write(folder, own, valid(own)) / missing).unlink()
    assert find(own) == ([], [])


DAMAGED = "is damaged"
OTHER = "is not of format 3"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"format": 3, "comm', DAMAGED),
        (b"\xff\xfe\x00!", DAMAGED),
        (b"[" * 100_000, DAMAGED),
        (b"[1]", OTHER),
        (b'{"format": 1}', OTHER),
        (b'{"format": 3}', DAMAGED),
        ({"command": "train"}, DAMAGED),
        ({"command": [1]}, DAMAGED),
        ({"run": 3}, DAMAGED),
        ({"ipus": [{"id": "0", "platform": "cpu", "kind": "cpu"}]}, DAMAGED),
        ({"ipus": [{"id": True, "platform": "cpu", "kind": "cpu"}]}, DAMAGED),
        ({"ipus": [{"id": 0, "platform": "cpu", "kind": "cpu", "stages": [["mlp"]]}]}, DAMAGED),
        ({"ipus": [{"id": 0}]}, DAMAGED),
        ({"ipus": [0]}, DAMAGED),
        ({"ipus": {}}, DAMAGED),
        ({"instance": None}, DAMAGED),
        ({"instance": 10**4000}, DAMAGED),
        ({"replicas": -1}, DAMAGED),
        (b" " * (1 << 21), "said.json is too large for a record"),
    ],
)
def test_what_is_damaged_or_of_another_format_is_ignored_and_named(folder, own, content, reason):
    path = write(folder, own, content if isinstance(content, bytes) else valid(own, **content))
    found, (ignored,) = find(own)
    assert (found, ignored.path) == ([], str(path))
    assert reason in ignored.reason
    assert path.exists()  # its process lives


def test_a_pipe_or_a_link_in_place_of_a_record_stops_nobody(folder, own):
    path = write(folder, own) / "said.json"
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in find(own)[1][0].reason
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert "Is a symbolic link" in find(own)[1][0].reason


def test_a_link_may_lead_to_a_record_in_another_place_of_the_same_user(folder, own, tmp_path):
    path = write(folder, own, valid(own))
    path.rename(tmp_path / "there")
    path.symlink_to(tmp_path / "there")
    assert len(find(own)[0]) == 1
    (tmp_path / "there").chmod(0o750)
    assert find(own)[1][0].reason == "has mode 750, not 700"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert find(own)[1][0].reason == "Not a directory"


def test_other_files_in_the_folder_are_named_and_left(folder, own):
    folder.mkdir(mode=0o700)
    for name in ("notes", "1-2", f"{own}.old", "0-0-zzzzzzzz-0"):
        (folder / name).write_text("")
    found, ignored = find(own)
    assert (found, {one.reason for one in ignored}, len(ignored)) == ([], {"has no name of a record"}, 4)
    assert len(list(folder.iterdir())) == 4


def test_a_folder_that_others_may_enter_is_not_read(folder, own):
    write(folder, own, valid(own))
    folder.chmod(0o755)
    found, (ignored,) = find(own)
    assert (found, ignored.path, ignored.reason) == ([], str(folder), "has mode 755, not 700")


def test_another_users_folder_is_not_believed_to_be_ones_own(folder, own, monkeypatch):
    path = write(folder, own._replace(start=1), valid(own))
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    found, (ignored,) = find(own)
    assert (found, ignored.reason) == ([], f"belongs to user {os.getuid()}, not 4321")
    assert path.exists()


def test_root_looks_into_the_folders_of_all_users(tmp_path, own, monkeypatch):
    monkeypatch.delenv("IPU_JAX_MONITOR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "scratch"))
    monkeypatch.setattr(records, "_OF_USERS", tmp_path / "users")
    for name in ("users/1001", "users/none", "scratch/ipu_jax-1002", "scratch/ipu_jax-me", "scratch/other"):
        (tmp_path / name).mkdir(parents=True)

    def looked_at(uid):
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        return {(str(path.relative_to(tmp_path)), owner) for path, owner in records._folders()}

    everybodys = {("users/0/ipu_jax", 0), ("scratch/ipu_jax-0", 0)}
    assert looked_at(0) == {*everybodys, ("users/1001/ipu_jax", 1001), ("scratch/ipu_jax-1002", 1002)}
    assert looked_at(7) == {("users/7/ipu_jax", 7), ("scratch/ipu_jax-7", 7)}


@pytest.fixture
def of_another_user(monkeypatch):
    """Let this process be another user's monitor, whose folder and files those of the test are."""
    fstat = os.fstat
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*fstat(file)[:4], 4321, *fstat(file)[5:]]))


@pytest.mark.parametrize("uid", [0, 1234])
@pytest.mark.usefixtures("of_another_user")
def test_nobody_can_claim_another_users_process(folder, own, monkeypatch, uid):
    """A record may name any process, such as number 1, whose start everybody may read."""
    path, owner, uids = write(folder, own, valid(own)), 4321, psutil.Process().uids()
    as_dict = psutil.Process.as_dict
    seen = lambda self, names: as_dict(self, names) | {"uids": uids._replace(effective=owner)}
    monkeypatch.setattr(psutil.Process, "as_dict", seen)
    assert len(find(own)[0]) == 1
    owner = uid
    shown, (ignored,) = find(own)
    assert (shown, ignored.path, ignored.reason) == ([], str(path), f"names a process of user {uid}")


def test_a_file_that_is_another_users_is_not_believed(folder, own, monkeypatch):
    path, fstat = write(folder, own, valid(own)), os.fstat

    def owned(file):
        found = fstat(file)
        return os.stat_result([*found[:4], 4321, *found[5:]]) if stat.S_ISREG(found.st_mode) else found

    monkeypatch.setattr(os, "fstat", owned)
    shown, (ignored,) = find(own)
    assert (shown, ignored.path, ignored.reason) == ([], str(path), f"beacon belongs to user 4321, not {os.getuid()}")


def test_a_process_that_may_not_be_looked_into_is_its_users_nonetheless(folder, own):
    # PR_SET_DUMPABLE: most of its files in /proc are root's from then on
    code = "import ctypes, os; os.geteuid() or os.setuid(65534); ctypes.CDLL(None).prctl(4, 0); print(1); input()"
    words = [sys.executable, "-uc", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "1\n"
        assert os.stat(f"/proc/{running.pid}/environ").st_uid == 0
        assert psutil.Process(running.pid).as_dict(records._ASKED)["uids"].effective == (os.getuid() or 65534)
        running.communicate("\n")


def test_a_process_that_is_not_there_does_not_live(own):
    assert is_living(own)
    assert not is_living(own._replace(pid=4194304))
    assert Identity.parse("1-2-3") is None
