"""A Slurm cluster of one node on this machine for the tests of `sweep.on=slurm`.

It needs root on Debian or Ubuntu: apt-get install slurm-wlm. Everything that it writes, keys
and logs included, is in one folder, and its daemons listen on loopback.
Jobs of the default partition `low` are requeued when one of the partition `high` preempts them. There is no GPU.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODE = socket.gethostname().partition(".")[0]
DAEMONS = ("slurmd", "slurmctld", "munged")
"""In the order in which they stop."""
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
CPUS, MEMORY_MB = 4, 16_000
"""Of the node, whatever the machine has."""
START_S, STOP_S = 60.0, 30.0
"""Longest time that a daemon may take to answer, and all daemons to stop."""

SLURM_CONF = """\
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
# A requeued job starts again after cred_expire seconds, not after two minutes.
AuthInfo=socket={home}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/slurmd.log
# The machine may have no cgroups: Slurm's accounting measures the memory of a job and kills it above its limit.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
NodeName={node} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory}
PartitionName=low Nodes={node} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes={node} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


class ClusterError(Exception):
    """The cluster cannot be started here; the message says what to do."""


def missing() -> str:
    """Return why this machine cannot start a cluster, and what to do; empty if it can."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "only root can start slurmd: use sudo"


class SlurmCluster:
    """A cluster in a folder; `environment` has what its commands need.

    Args:
        home: The folder of the cluster, whose path must be short (less than 90 characters, because of sockets).
    """

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.environment = {"SLURM_CONF": str(self.home / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons, and wait until the node is idle.

        Raises:
            ClusterError: A program is missing, or a daemon does not answer.
        """
        if problem := missing():
            raise ClusterError(problem)
        self.stop()
        for name in ("state", "spool", "log", "munge"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)
        self._configure()
        self._start_munge()
        self._call("slurmctld", "-c")
        self._wait("scontrol", "ping", accept=lambda text: "is UP" in text)
        self._call("slurmd", "-N", NODE)
        self._wait("sinfo", "--noheader", "--format=%D %t", "--partition=low", accept=lambda text: text == "1 idle\n")

    def stop(self) -> None:
        if self._pid("slurmctld") and self._pid("slurmd"):
            deadline = time.monotonic() + STOP_S
            for partition in ("low", "high"):
                self._call("scancel", f"--partition={partition}", check=False)
            # A job that outlives slurmd is not stopped by anything.
            while self._call("squeue", "--noheader", check=False).strip() and time.monotonic() < deadline:
                time.sleep(0.1)
        for name in DAEMONS:
            if pid := self._pid(name):
                os.kill(pid, signal.SIGTERM)
                deadline = time.monotonic() + STOP_S
                while self._pid(name) and time.monotonic() < deadline:
                    time.sleep(0.05)

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands and return what it prints.

        Raises:
            ClusterError: The command failed.
        """
        return self._call(*command)

    def _configure(self) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        values = {"home": self.home, "ports": ports, "node": NODE, "cpus": CPUS, "memory": MEMORY_MB}
        (self.home / "slurm.conf").write_text(SLURM_CONF.format(**values))

    def _start_munge(self) -> None:
        folder = self.home / "munge"
        key = folder / "key"
        if not key.exists():
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
        files = {"key-file": key, "socket": folder / "socket", "seed-file": folder / "seed"}
        files |= {"pid-file": self.home / "munged.pid", "log-file": self.home / "log" / "munged.log"}
        self._call("munged", "--force", *(f"--{option}={path}" for option, path in files.items()))

    def _program(self, name: str) -> str:
        return shutil.which(name, path=SEARCH_PATH) or name

    def _call(self, *command: str, check: bool = True) -> str:
        # Not a pipe, which a daemon would hold open.
        with tempfile.TemporaryFile() as output:
            environment = os.environ | self.environment
            result = subprocess.run(
                [self._program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, check=False,
            )  # fmt: skip
            output.seek(0)
            text = output.read().decode(errors="replace")
        if check and result.returncode:
            raise ClusterError(f"{' '.join(command)} failed ({result.returncode}): {text.strip()[-500:]}")
        return text

    def _wait(self, *command: str, accept: Callable[[str], bool] = lambda _: True) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if accept(text := self._call(*command)):
                    return
                problem = text.strip()
            except ClusterError as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise ClusterError(f"no answer for {START_S:.0f} s, see {self.home / 'log'}: {problem}")
            time.sleep(0.1)

    def _pid(self, name: str) -> int | None:
        """Return the process of a daemon if it runs."""
        try:
            pid = int((self.home / f"{name}.pid").read_text())
            runs = name in Path(f"/proc/{pid}/cmdline").read_text()
        except (OSError, ValueError):
            return None
        return pid if runs else None
