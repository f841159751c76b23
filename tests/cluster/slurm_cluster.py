"""A Slurm of two nodes on this machine, for tests: munged, slurmctld and two slurmd as processes of their
own, ended by their ids.

The configuration is in a temporary directory. Needs root and Debian's packages slurmctld, slurmd,
slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
START_SECONDS = 60.0
STOP_SECONDS = 10.0
JOBS_SECONDS = 40.0
"""Longer than KillWait: what a job leaves on a node is ended by the node's daemon."""
CPUS = 4


def missing() -> str | None:
    """Return why no cluster can be started here, or None."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"without {', '.join(absent)}: `apt-get install slurmctld slurmd slurm-client munge`"
    return None if os.geteuid() == 0 else "slurmd needs root"


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass
class Cluster:
    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Slurm's commands find this cluster."""
        paths = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {"PATH": paths, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        user = pwd.getpwnam("munge")
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        subprocess.run(["mungekey", "--create", "--keyfile", munge / "key"], check=True)
        for path in (munge, munge / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        (self.folder / "slurm.conf").write_text(self._configuration(), encoding="utf-8")
        files = {
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
            "key-file": "key",
        }
        options = [f"--{option}={munge / name}" for option, name in files.items()]
        self._run(
            "munged",
            "setpriv",
            f"--reuid={user.pw_uid}",
            f"--regid={user.pw_gid}",
            "--clear-groups",
            "munged",
            "-F",
            *options,
        )
        self._wait(lambda: (munge / "socket").exists(), "munged made no socket")
        for node in NODES:
            self.start_node(node)
        self._run("slurmctld", "slurmctld", "-D", "-c")
        self._wait(
            lambda: self.call("sinfo", "-h", "-o", "%t", "-N").split() == ["idle"] * len(NODES),
            "the nodes are not idle",
        )

    def start_node(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node, and with it the node as far as the controller can see."""
        self.daemons[node].kill()
        self.daemons[node].wait()

    def stop(self) -> None:
        """Cancel what runs, and end the daemons that `start` started, the controller last but munged."""
        with contextlib.suppress(subprocess.SubprocessError, RuntimeError):
            self.cancel_all()
        for name in (*NODES, "slurmctld", "munged"):
            if (process := self.daemons.get(name)) is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def cancel_all(self) -> None:
        """Cancel the jobs of this cluster, and wait until they are gone."""
        if jobs := self.call("squeue", "-h", "-o", "%A").split():
            self.call("scancel", *jobs, check=False)
        deadline = time.monotonic() + JOBS_SECONDS
        while self.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)

    def call(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
            timeout=60,
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}{self._logs()}")
        return done.stdout

    def _run(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            environment = {**os.environ, **self.environment}
            self.daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _wait(self, is_ready: object, message: str) -> None:
        assert callable(is_ready)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if is_ready():
                    return
            time.sleep(0.2)
        raise RuntimeError(f"{message} within {START_SECONDS:.0f} s\n{self._logs()}")

    def _logs(self) -> str:
        return "\n".join(
            f"── {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.out"))
        )

    def _configuration(self) -> str:
        host, folder = socket.gethostname().split(".")[0], self.folder
        control, *nodes = self.ports
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge/socket",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            "ReturnToService=2",
            "SlurmdTimeout=20",
            "KillWait=20",
            "SlurmdParameters=config_overrides",
            *(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
                for node, port in zip(NODES, nodes, strict=True)
            ),
            f"PartitionName=debug Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP "
            "OverSubscribe=NO",
        ]
        return "".join(f"{line}\n" for line in lines)


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
