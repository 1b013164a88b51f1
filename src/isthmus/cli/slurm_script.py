"""The file that `sbatch` takes: what to ask for, and `isthmus join` for each replica or stage. Text only.

Every value from outside is quoted for the shell. Lines that Slurm reads itself have their own quoting rules,
so what stands in them is checked against a narrow shape in place of that.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.config.checks import short
from isthmus.errors import ConfigError

HEAD = "#!/bin/bash\n# Written by `isthmus slurm`"
SPARE_SECONDS = 10  # of the notice: for Slurm to deliver the signal, and for the shell to end after us
LEAST_NOTICE_SECONDS = 30
PORT = 29500
AGAIN = 75  # of `isthmus join --grace`: left for now
SHAPES = {
    "--partition": (r"[\w.,+-]{1,200}", "a name, or several with commas"),
    "--time": (r"(\d{1,4}-)?\d{1,6}(:\d{1,2}){0,2}", "minutes, H:MM:SS or D-HH:MM:SS"),
    "--gpus": (r"([A-Za-z0-9_.-]{1,60}:)?\d{1,3}", "a number, or KIND:NUMBER"),
    "--mem": (r"\d{1,9}[KMGT]?", "megabytes, or a number with K, M, G or T"),
    "--sbatch": (
        r"--[a-z][a-z-]{1,40}(=[^\x00-\x20\x7f\\'\"#`$]{1,500})?",
        "one option, as --account=physics",
    ),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One replica, or one stage of it."""

    words: Sequence[str]  # after `isthmus join`
    state: str  # the folder that the next start finds again


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all tasks of the file have in common."""

    name: str
    folder: str  # where it was typed: keys and relative paths are found from there
    program: Sequence[str]  # `python -m isthmus`
    partition: str = ""
    time: str = ""
    gpus: str = ""
    cpus: int = 0
    mem: str = ""
    at_once: int = 0
    notice_seconds: int = 120
    options: Sequence[str] = ()  # of sbatch, as they are
    setup: Sequence[str] = ()  # lines of shell, as the user wrote them
    nodes: int = 1  # more than one: a stage on each of them
    master: str = ""  # where those meet; empty: on the first node

    def __post_init__(self) -> None:
        for option, value in (("--partition", self.partition), ("--time", self.time), ("--gpus", self.gpus)):
            check_shape(option, value)
        check_shape("--mem", self.mem)
        for option in self.options:
            check_shape("--sbatch", option)
        for line in self.setup:
            if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", line):
                raise ConfigError("--setup is one line of shell; give it once for each line")
        if not LEAST_NOTICE_SECONDS <= self.notice_seconds <= 65535:
            raise ConfigError(
                f"--signal is {short(self.notice_seconds)}; it is {LEAST_NOTICE_SECONDS} to 65535 seconds"
            )
        if min(self.cpus, self.at_once) < 0:
            raise ConfigError("--cpus and --at-once are whole numbers from 1 on")

    @property
    def grace_seconds(self) -> int:
        return self.notice_seconds - SPARE_SECONDS


def check_shape(option: str, value: str) -> None:
    shape, words = SHAPES[option]
    if value and not re.fullmatch(shape, value, re.ASCII):
        raise ConfigError(f'{option} is "{short(value)}"; give {words}')


def sbatch_text(job: Job, tasks: Sequence[Task]) -> str:
    """Several tasks become an array."""
    return "\n".join([*_asks(job, len(tasks)), "", *_shell(job, tasks), ""])


def _asks(job: Job, num_tasks: int) -> list[str]:
    log = "%x-%A_%a.log" if num_tasks > 1 else "%x-%j.log"
    array = f"0-{num_tasks - 1}" + (f"%{job.at_once}" if job.at_once else "")
    asks = [
        f"--job-name={job.name}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=TERM@{job.notice_seconds}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--array={array}"] if num_tasks > 1 else []),
        *([f"--partition={job.partition}"] if job.partition else []),
        *([f"--time={job.time}"] if job.time else []),
        *([f"--gres=gpu:{job.gpus}"] if job.gpus else []),
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else []),
        *([f"--mem={job.mem}"] if job.mem else []),
        *job.options,
    ]
    return [
        f"{HEAD}; submit it with `sbatch FILE`. Slurm may take the job back and",
        "# start it again as often as it likes: each start goes on where the last one stopped.",
        *(f"#SBATCH {line}" for line in asks),
    ]


def _shell(job: Job, tasks: Sequence[Task]) -> list[str]:
    step = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}"]
    step += [f"--cpus-per-task={job.cpus}"] if job.cpus else []
    join, grace = [*job.program, "join"], f"--grace {job.grace_seconds}"
    if job.nodes > 1:
        # Each task of the step finds out by itself which stage it is.
        inner = 'state=$1; shift; exec "$@" --stage "$SLURM_PROCID" --work "$state/stage-$SLURM_PROCID"'
        step += ["--kill-on-bad-exit=0", "bash", "-c", inner, "stage"]
        run = f'{shlex.join(step)} "$state" {shlex.join(join)} "${{task[@]}}" {grace} --master "$master"'
    else:
        run = f'{shlex.join(step)} {shlex.join(join)} "${{task[@]}}" {grace} --work "$state"'
    return [
        f"cd -- {shlex.quote(job.folder)} || exit 2",
        *job.setup,
        *_chosen(tasks),
        *([_master(job)] if job.nodes > 1 else []),
        "# Where Slurm itself ends the job (a requeue, scancel), this shell gets SIGTERM too. It waits for",
        "# the step, which saves and ends by itself.",
        "ended=",
        "trap 'ended=yes' TERM",
        run,
        "status=$?",
        f"# {AGAIN}: left before the run was finished. Slurm requeues what it has ended; where the time",
        "# limit has come, nobody does but us.",
        f'if [ "$status" -eq {AGAIN} ] && [ -z "$ended" ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"',
    ]


def _chosen(tasks: Sequence[Task]) -> list[str]:
    set_each = [f"task=({shlex.join(task.words)}) state={shlex.quote(task.state)}" for task in tasks]
    if len(tasks) == 1:
        return set_each
    return [
        'case "$SLURM_ARRAY_TASK_ID" in',
        *(f"{i}) {words} ;;" for i, words in enumerate(set_each)),
        '*) echo "no task $SLURM_ARRAY_TASK_ID in this file" >&2; exit 2 ;;',
        "esac",
    ]


def _master(job: Job) -> str:
    if job.master:
        return f"master={shlex.quote(job.master)}"
    return f'master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}"'
