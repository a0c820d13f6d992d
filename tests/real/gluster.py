"""A GlusterFS volume of two replicas, mounted twice, as two hosts would see it; started and stopped by the tests.

The servers live in network, mount and PID namespaces of their own, so that they meet no other GlusterFS, leave
nothing in the system's directories and end, all of them, when the first process of their PID namespace is ended.
The mounts are made outside, where the tests can use them. Everything ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

HOST = "10.119.7.1"
VOLUME = "blocks"
HOSTS = ("A", "B")
COMMAND_TIMEOUT_S = 30.0
START_TIMEOUT_S = 45.0
END_TIMEOUT_S = 15.0
_LOOK_AGAIN_S = 0.05
_DETACH = 2
_LOG_LINES = 3
_PROGRAMS = {
    "glusterd": "glusterfs-server",
    "gluster": "glusterfs-server",
    "glusterfs": "glusterfs-client",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
_SETTINGS = """\
volume management
    type mgmt/glusterd
    option working-directory {directory}/state
    option run-directory {directory}/run
    option glusterd-sockfile {directory}/control
    option transport-type socket
    option transport.address-family inet
    option transport.socket.bind-address {host}
    option transport.socket.listen-port 24007
end-volume
"""
# The shell is the first process of its PID namespace: it must reap what dies, or dead bricks seem to be alive.
_PREPARE = """\
set -e
ip link set lo up
ip address add {host}/32 dev lo
mount --bind {directory}/log /var/log/glusterfs
echo ready
sleep infinity &
wait
"""


def why_not() -> str:
    """What is missing here to run GlusterFS, in words; '' when it can be run."""
    if os.geteuid() != 0:
        return "GlusterFS needs root for its mounts and namespaces"
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        return f"GlusterFS needs the packages {', '.join(missing)}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "GlusterFS needs /dev/fuse"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )
    return f"GlusterFS needs namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class GlusterError(Exception):
    """A server or a mount does not do what it should; the message has the end of its log."""


class GlusterVolume:
    """One volume with two bricks. `mounts` are the two hosts' views of it.

    `brick_bytes`: each brick is an ext4 of that size of its own; None: a directory, as large as its file system.
    """

    def __init__(self, directory: Path, brick_bytes: int | None = None) -> None:
        self.directory = directory
        self.bricks = [directory / f"brick{number}" for number in (1, 2)]
        self.mounts = [directory / f"host{name}" for name in HOSTS]
        self._holder: subprocess.Popen[str] | None = None
        self._clients: list[subprocess.Popen[bytes]] = []
        self._looped: list[Path] = []
        self._probes = itertools.count()
        for path in [*self.bricks, *self.mounts, *(directory / name for name in ("state", "run", "log"))]:
            path.mkdir(parents=True)
        if brick_bytes is not None:
            for brick in self.bricks:
                self._loop_mount(brick, brick_bytes)

    # Start and end.

    def start(self) -> None:
        """Starts servers and mounts and waits until both hosts can write. GlusterError if they cannot."""
        settings = self.directory / "glusterd.vol"
        settings.write_text(_SETTINGS.format(directory=self.directory, host=HOST))
        self._hold_namespaces()
        log = self.directory / "log" / "glusterd.log"
        self._serve(
            "glusterd", "-f", str(settings), "-p", str(self.directory / "glusterd.pid"), "-l", str(log)
        )
        self._eventually(lambda: self._gluster("volume", "list").returncode == 0, "glusterd answers")
        places = [f"{HOST}:{brick}/data" for brick in self.bricks]
        self._must("volume", "create", VOLUME, "replica", "2", *places, "force")
        self._must("volume", "set", VOLUME, "network.ping-timeout", "5")
        self._must("volume", "start", VOLUME)
        for mount in self.mounts:
            self._mount(mount)
        self.wait_usable()

    def stop(self) -> None:
        """Ends all that start() began, as far as it came. Idempotent."""
        libc = ctypes.CDLL(None, use_errno=True)
        for mount in self.mounts:
            libc.umount2(os.fsencode(mount), _DETACH)
        for client in self._clients:
            client.kill()
            client.wait(END_TIMEOUT_S)
        if self._holder is not None:
            # With its first process all of a PID namespace ends; the holder ends when that is done.
            for pid in self._children(self._holder.pid):
                os.kill(pid, signal.SIGKILL)
            try:
                self._holder.wait(END_TIMEOUT_S)
            finally:
                self._holder.kill()
                assert self._holder.stdout is not None
                self._holder.stdout.close()
        self._clients, self._holder = [], None
        for place in self._looped:
            subprocess.run(["umount", str(place)], check=True, timeout=COMMAND_TIMEOUT_S)
        self._looped = []

    # Faults.

    def kill_bricks(self, count: int = 2) -> None:
        """SIGKILL to the processes of so many bricks."""
        chosen = self._bricks_running()[:count]
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        self._eventually(lambda: not set(chosen) & set(self._brick_processes()), "the bricks are gone")

    def freeze_bricks(self) -> None:
        """Both bricks stop to answer, and keep their connections."""
        for pid in self._bricks_running():
            os.kill(pid, signal.SIGSTOP)

    def thaw_bricks(self) -> None:
        """Ends a freeze_bricks() and waits until both hosts can write."""
        for pid in self._bricks_running():
            os.kill(pid, signal.SIGCONT)
        self.wait_usable()

    def restart_bricks(self) -> None:
        """Starts the bricks again and waits until both hosts can write."""
        self._eventually(self._start_bricks, "both bricks run again")
        self.wait_usable()

    def make_replicas_disagree(self, path: Path) -> None:
        """Both bricks get another new file under one name, each while the other is dead: from then on any use of that
        name is EIO. `path` is within the volume, and its directory is there."""
        first, second = self.bricks
        of_a, of_b = (
            mount / path for mount in self.mounts
        )  # the second to write must not remember the first's file
        self._kill(first)
        self._write_somehow(of_a, "as the second brick has it")
        self._kill(second)
        hidden = second / "hidden"  # glusterd starts what it finds
        (second / "data").rename(hidden)
        try:
            self._eventually(lambda: self._start_brick(first), "the first brick runs again")
            self._write_somehow(of_b, "as the first brick has it")
        finally:
            hidden.rename(second / "data")
        self.restart_bricks()

    def wait_usable(self) -> None:
        """Waits until each host can write a file and see the other's."""
        self._eventually(self._usable, "both hosts can write")

    # Inside.

    def _hold_namespaces(self) -> None:
        """Starts the process that the namespaces belong to. It dies with this one, and all in them with it."""
        prepare = _PREPARE.format(host=HOST, directory=self.directory)
        os.makedirs("/var/log/glusterfs", exist_ok=True)
        namespaces = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        complaints = self.directory / "log" / "namespaces"
        with complaints.open("w") as file:
            self._holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-c", prepare],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":  # it says so, or ends
            raise GlusterError(f"the namespaces cannot be prepared: {complaints.read_text()}")

    @property
    def _first_pid(self) -> int:
        """The first process of the PID namespace, as it is called here."""
        assert self._holder is not None
        return self._children(self._holder.pid)[0]

    @staticmethod
    def _children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _serve(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command among the servers."""
        return subprocess.run(
            ["nsenter", "--target", str(self._first_pid), "--net", "--mount", "--pid", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )

    def _gluster(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._serve("gluster", "--mode=script", f"--glusterd-sock={self.directory}/control", *words)

    def _must(self, *words: str) -> None:
        done = self._gluster(*words)
        if done.returncode:
            raise GlusterError(f"gluster {' '.join(words)}: {done.stdout}{done.stderr}{self._log_end()}")

    def _mount(self, place: Path) -> None:
        """Starts a client in the foreground: in the servers' network, but mounting where the tests are."""
        command = [
            "glusterfs", "--no-daemon", f"--volfile-server={HOST}", f"--volfile-id={VOLUME}",
            f"--log-file={self.directory}/log/{place.name}.log", f"--pid-file={self.directory}/{place.name}.pid",
            str(place),
        ]  # fmt: skip
        enter = ["nsenter", "--target", str(self._first_pid), "--net"]
        self._clients.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        self._eventually(lambda: os.path.ismount(place), f"{place.name} is mounted")

    def _kill(self, brick: Path) -> None:
        for pid in self._brick_processes(brick):
            os.kill(pid, signal.SIGKILL)
        self._eventually(lambda: not self._brick_processes(brick), "the brick is gone")

    def _start_brick(self, brick: Path) -> bool:
        self._must("volume", "start", VOLUME, "force")
        return len(self._brick_processes(brick)) == 1

    def _write_somehow(self, path: Path, text: str) -> None:
        def written() -> bool:
            try:
                path.write_text(text)
            except OSError:
                return False
            return True

        self._eventually(written, f"{path.name} can be written")

    def _start_bricks(self) -> bool:
        """glusterd starts a brick again only when it has learnt that it died."""
        self._must("volume", "start", VOLUME, "force")
        return len(self._brick_processes()) == len(self.bricks)

    def _usable(self) -> bool:
        """Each host writes a file that the other sees. A new one each time: what was being written while the servers
        went away may differ on two replicas, and is refused for good."""
        made: list[Path] = []
        try:
            for mount, other in zip(self.mounts, reversed(self.mounts), strict=True):
                probe = mount / f"probe{next(self._probes)}"
                made.append(probe)
                probe.write_text("x")
                if not (other / probe.name).exists():
                    return False
        except OSError:
            return False
        finally:
            for probe in made:
                with contextlib.suppress(OSError):
                    probe.unlink()
        return True

    def _brick_processes(self, brick: Path | None = None) -> list[int]:
        """The processes of the bricks, or of one: those of that name in our PID namespace, and no others."""
        of_brick = b"" if brick is None else os.fsencode(brick)
        ours = os.readlink(f"/proc/{self._first_pid}/ns/pid")
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if not any(of_brick in word for word in words):
                    continue
                if words[0].endswith(b"glusterfsd") and os.readlink(f"/proc/{pid}/ns/pid") == ours:
                    found.append(int(pid))
            except OSError:
                continue  # it has ended
        return found

    def _bricks_running(self) -> list[int]:
        found = self._brick_processes()
        if len(found) != len(self.bricks):
            raise GlusterError(f"{len(found)} bricks are running. {self._log_end()}")
        return found

    def _loop_mount(self, place: Path, size_bytes: int) -> None:
        image = place.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(size_bytes)
        for command in (["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, place]):
            subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)
        self._looped.append(place)

    def _eventually(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise GlusterError(f"not within {START_TIMEOUT_S:g} s: {what}. {self._log_end()}")
            time.sleep(_LOOK_AGAIN_S)

    def _log_end(self) -> str:
        """The last errors in each log."""
        told = []
        for path in sorted((self.directory / "log").rglob("*.log")):
            errors = [line for line in path.read_text(errors="replace").splitlines() if "] E [" in line]
            told += [f"{path.name}: {line}" for line in errors[-_LOG_LINES:]]
        return "\n".join(told)
