"""A real Slurm on this machine: one controller and several nodes, all in a temporary folder.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge; `reason_to_skip` says what is missing.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from servers import free_ports

from isthmus.config import Recipe
from isthmus.config.toml import dump_recipe

TEMPLATE = Path(__file__).parents[2] / "deploy" / "slurm.sh"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
LIMIT_SECONDS = 240.0  # for a machine that does much else; nothing waits for it
CONFIG = """
ClusterName=isthmus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def reason_to_skip() -> str:
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"no {missing[0]} here; apt-get install slurmctld slurmd slurm-client munge"
    return ""


def until(done: Callable[[], Any], what: str, limit_seconds: float = LIMIT_SECONDS) -> Any:
    """Wait for an event; what it gave."""
    deadline = time.monotonic() + limit_seconds
    while not (found := done()):
        assert time.monotonic() < deadline, f"{what}, and {limit_seconds:.0f} s are over"
        time.sleep(0.2)
    return found


def submit_run(recipe: Recipe, folder: Path, names: Sequence[str], environment: dict[str, str]) -> str:
    """Begin a run in a folder, and submit its replicas by deploy/slurm.sh: the number of the array."""
    program = f"{sys.executable} -P -m isthmus"
    (folder / "recipe.toml").write_text(dump_recipe(recipe))
    how = {"cwd": folder, "env": environment | {"ISTHMUS": program}}
    subprocess.run(
        [*program.split(), "init", "recipe.toml", "bucket"], **how, check=True, stdout=subprocess.DEVNULL
    )
    files = [str(Path("keys", recipe.name, f"{name}.isthmus.toml")) for name in names]
    array = ["--cpus-per-task=1", f"--array=0-{len(names) - 1}"]
    done = subprocess.run(
        ["sbatch", "--parsable", *array, str(TEMPLATE), *files], **how, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Cluster:
    """`with Cluster(2) as cluster:` and its commands find it by SLURM_CONF."""

    def __init__(self, num_nodes: int, cpus: int = 1, kill_wait: int = 60, grace: int = 0) -> None:
        """`kill_wait`: seconds between SIGTERM and SIGKILL; `grace`: more of them before a preemption."""
        self.folder = Path(tempfile.mkdtemp(prefix="isthmus-slurm-"))  # short: a socket's path has 108 bytes
        self.names = [f"n{i}" for i in range(num_nodes)]
        port, *ports = free_ports(1 + num_nodes)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={at} CPUs={cpus} RealMemory=2000"
            for name, at in zip(self.names, ports, strict=True)
        )
        given = {"host": host, "port": port, "folder": self.folder, "nodes": nodes}
        self.config = self.folder / "slurm.conf"
        self.config.write_text(CONFIG.format(**given, kill_wait=kill_wait, grace=grace))
        self.daemons: list[subprocess.Popen] = []

    @property
    def environment(self) -> dict[str, str]:
        """Without what a job of another Slurm may have set."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.config)}

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self._end_daemons()
            raise
        return self

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        for name in ("state", *(f"spool-{name}" for name in self.names)):
            (self.folder / name).mkdir()
        at = {name: f"--{name}-file={self.folder / name}" for name in ("key", "pid", "log", "seed")}
        at["key"] = f"--key-file={key}"
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *at.values()
        )
        until((self.folder / "munge.socket").exists, "munged makes no socket")
        self._daemon("slurmctld", "-D", "-f", str(self.config))
        for name in self.names:
            self._daemon("slurmd", "-D", "-N", name, "-f", str(self.config))
        until(lambda: self.call("sinfo", "-h", "-o", "%T", check=False) == "idle", "the nodes do not come up")

    def _daemon(self, *words: str) -> None:
        with open(self.folder / f"{words[0]}.out", "ab") as log:
            how = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}
            self.daemons.append(subprocess.Popen(words, env=self.environment, **how))

    def call(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        words = self.call("scontrol", "-o", "show", "job", number).split()
        return {key: value for key, sign, value in (word.partition("=") for word in words) if sign}

    def running(self, number: str) -> bool:
        return self.job(number)["JobState"] == "RUNNING"

    def ended(self, number: str) -> bool:
        return self.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def requeue(self, number: str) -> None:
        """Take a running job back; Slurm would start it again after two minutes, so it is told to hurry."""
        before = int(self.job(number)["Restarts"])
        self.call("scontrol", "requeue", number)
        until(lambda: int(self.job(number)["Restarts"]) > before, "the job is not requeued")
        until(lambda: self.job(number)["JobState"] == "PENDING", "the job does not end")
        self.call("scontrol", "update", f"JobId={number}", "StartTime=now")

    def __exit__(self, *about: object) -> None:
        try:
            self.call("scancel", "--full", "--user=root", check=False)
            self.call("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            until(lambda: not self.call("squeue", "-h", check=False), "jobs do not end")
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)
