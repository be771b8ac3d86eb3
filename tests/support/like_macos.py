"""Take away from a process what macOS does not have, so that a test on Linux sees what a laptop sees.

    python -c "from support import like_macos; like_macos.hide(); ..."

Child processes and code that is not Python still have everything. Nothing here imports jax.
"""

import builtins
import errno
import importlib
import io
import os
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any, Final

import psutil

_LINUX_ONLY: Final = {
    # os.waitid is on macOS from Python 3.13
    "os": """
        waitid P_PID P_PGID P_ALL P_PIDFD WEXITED WSTOPPED WNOWAIT CLD_EXITED CLD_KILLED CLD_DUMPED CLD_STOPPED
        CLD_TRAPPED CLD_CONTINUED
        sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler sched_getparam sched_setparam
        posix_fallocate posix_fadvise fdatasync pipe2 eventfd eventfd_read eventfd_write memfd_create pidfd_open
        copy_file_range splice setns unshare getrandom getresuid getresgid setresuid setresgid
        getxattr setxattr listxattr removexattr O_PATH O_TMPFILE O_DIRECT O_NOATIME O_LARGEFILE
    """,
    "select": "epoll",
    "signal": "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL",
    "socket": "SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED AF_NETLINK AF_VSOCK",
    "time": "CLOCK_BOOTTIME CLOCK_TAI",
}
_OF_FILES: Final = ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access", "statvfs")
_CALLERS: Final = 5


def hide() -> None:
    """Remove names that only Linux has, and /proc, and name the system "darwin", until the process ends.

    psutil still reads /proc, in place of the calls that it makes on macOS, but without the methods that it lacks there.
    """
    sysconfig.get_config_vars()  # it would look for macOS's
    sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # urllib imports it on macOS
    vars(sys.modules["_scproxy"]).update(_get_proxies=dict, _get_proxy_settings=dict)
    sys.platform = "darwin"
    for module, names in _LINUX_ONLY.items():
        for name in names.split():
            vars(importlib.import_module(module)).pop(name, None)
    os.process_cpu_count = os.cpu_count  # pyright: ignore[reportAttributeAccessIssue]  # it would ask the affinity
    for name in _OF_FILES:
        before = getattr(os, name)
        setattr(os, name, without_proc := _without_proc(before))
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if before in able:
                able.add(without_proc)
    builtins.open = io.open = _without_proc(io.open)
    for name in ("cpu_affinity", "rlimit", "io_counters", "ionice", "cpu_num"):
        if hasattr(psutil.Process, name):
            delattr(psutil.Process, name)
        for names in (value for key, value in vars(psutil).items() if "attrnames" in key):
            names.discard(name)


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def without_proc(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        name = "" if isinstance(path, int) else os.fsdecode(path)
        if (name == "/proc" or name.startswith("/proc/")) and not _psutil_asks():
            if function.__name__ == "access":
                return False
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return function(path, *args, **kwargs)

    return without_proc


def _psutil_asks() -> bool:
    frame: types.FrameType | None = sys._getframe(2)  # the caller of without_proc
    for _ in range(_CALLERS):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("psutil"):
            return True
        frame = frame.f_back
    return False
