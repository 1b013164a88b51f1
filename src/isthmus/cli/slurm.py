"""`isthmus slurm`: a replica, or several, as jobs of a cluster that takes its machines back when it likes."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from isthmus.cli.bundles import SUFFIX
from isthmus.cli.slurm_script import HEAD, Job, Task, sbatch_text
from isthmus.errors import ConfigError, RunError
from isthmus.printing import visible

if TYPE_CHECKING:
    from isthmus.config import Member
    from isthmus.protocol.ledger import RunInfo

SUBMIT_SECONDS = 120.0

EPILOG = """examples:
  isthmus slurm s3://my-runs/first --replica rack-0 --gpus 1 --time 4:00:00 --submit
  isthmus slurm rack-0.isthmus.toml --gpus 1 --partition preempt      by the file that the owner sent you
  isthmus slurm s3://my-runs/first --array --at-once 2                all replicas whose keys are here
  isthmus slurm s3://my-runs/first --replica edge-0 --spread          its stages on as many nodes, in one job
  isthmus slurm s3://my-runs/first --replica edge-0 --stage 1 --relay 192.0.2.10:29520
  isthmus slurm s3://my-runs/first --replica rack-0 --setup 'module load cuda' --sbatch=--account=physics
Jobs are requeued when they are preempted or reach their time limit, and go on where they stopped: --state is
on a file system that all nodes see. Credentials of the bucket are not written: sbatch passes on the
environment it is called in.
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "slurm",
        help="write, and submit, a replica as a job for Slurm",
        description="Write a file for sbatch that runs one replica, or one stage of it, as a job that may be "
        "preempted and requeued at any time; several replicas become an array. With --submit, submit it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # Not `url`: a replica's file is not read here in place of the bucket, but by the job.
    where = "the run's bucket: s3://bucket/prefix, or a folder; or a replica's file, NAME.isthmus.toml"
    add("bucket", metavar="url", help=where)
    add("--replica", action="append", default=[], metavar="NAME", help="the replica; again: an array of them")
    add("--array", action="store_true", help="an array of all replicas whose keys are here")
    add("--at-once", type=int, default=0, metavar="N", help="of an array: at most so many jobs at a time")
    add("--stage", type=int, help="only this stage; needs --master or --relay, as `join` does")
    add("--spread", action="store_true", help="the stages of the replica on as many nodes, in one job")
    add("--master", default="", metavar="HOST:PORT", help="where stage 0 listens (--spread: the first node)")
    add("--relay", default="", metavar="HOST:PORT", help="in place of --master: where `isthmus relay` runs")
    add("--key", default="", metavar="FILE", help="the replica's private key (default: keys/RUN/NAME.key)")
    add("--state", default="work", metavar="DIR", help="private state, on a shared file system (work)")
    add("--partition", default="", help="as in sbatch; several with commas")
    add("--time", default="", help="as in sbatch: minutes, H:MM:SS or D-HH:MM:SS")
    add("--gpus", default="", metavar="[KIND:]N", help="GPUs of each node, as 1 or a100:1")
    add("--cpus", type=int, default=0, metavar="N", help="cores of each job; they are its threads too")
    add("--mem", default="", help="as in sbatch: 32G")
    notice = "how long before the end of the job SIGTERM is sent (120)"
    add("--signal", dest="notice_seconds", type=int, default=120, metavar="SECONDS", help=notice)
    more = "any other option of sbatch, as --sbatch=--account=physics; may be repeated"
    add("--sbatch", dest="options", action="append", default=[], metavar="OPTION", help=more)
    lines = "a line of shell before the start, such as 'module load cuda'; may be repeated"
    add("--setup", action="append", default=[], metavar="LINE", help=lines)
    joins = "more options for `isthmus join`, in one word: '--device cuda --compile'"
    add("--join", dest="join_options", default="", metavar="OPTIONS", help=joins)
    add("--file", default="", help="the file to write (default: RUN-NAME.sbatch); - prints it")
    add("--submit", action="store_true", help="give it to sbatch, and print the job's number")
    parser.set_defaults(run=slurm)


def slurm(args: argparse.Namespace) -> int:
    run_name, first, tasks, stages = _tasks(args)
    job = Job(
        name=f"isthmus-{run_name}" + (f"-{first}" if len(tasks) == 1 else ""),
        folder=os.getcwd(),
        program=(sys.executable, "-m", "isthmus"),
        nodes=stages if args.spread else 1,
        **{each: getattr(args, each) for each in ("partition", "time", "gpus", "cpus", "mem", "at_once")},
        **{each: getattr(args, each) for each in ("notice_seconds", "options", "setup", "master")},
    )
    text = sbatch_text(job, tasks)
    if args.file == "-":
        if args.submit:
            raise ConfigError("--file - only prints the file; leave one of --file - and --submit out")
        print(text, end="")
        return 0
    file = Path(args.file or f"{run_name}-{first if len(tasks) == 1 else 'array'}.sbatch")
    _write(file, text)
    print(f"{file}: {len(tasks)} job{'s' * (len(tasks) > 1)}", file=sys.stderr)
    if args.submit:
        print(_submit(file))
    else:
        print(f"sbatch {shlex.quote(str(file))}")
    return 0


def _tasks(args: argparse.Namespace) -> tuple[str, str, list[Task], int]:
    """The run's name, the first replica's, what each task joins as, and how many stages the first has."""
    extra = _join_options(args.join_options)
    if args.bucket.endswith(SUFFIX):
        if args.replica or args.array or args.key:
            raise ConfigError(
                f"{args.bucket} names its replica and key; leave --replica, --array and --key out"
            )
        return _by_bundle(args, extra)
    from isthmus.protocol.access import find_member, open_ledger

    run = open_ledger(args.bucket).run
    names = args.replica or ([m.name for m in run.recipe.fleet() if _key(run, m.name).is_file()] * args.array)
    if args.array and args.replica:
        raise ConfigError("--array takes every replica whose key is here; leave --replica out, or --array")
    if not names:
        keys = Path("keys") / run.recipe.name
        raise ConfigError(
            f"no key of this run is in {keys}; copy them there"
            if args.array
            else "which replica? --replica NAME"
        )
    if args.key and len(names) > 1:
        raise ConfigError("--key is one replica's; put the keys of several into keys/RUN")
    members = [find_member(run, name) for name in names]
    for member in members:
        _check(args, member)
        key = Path(args.key) if args.key else _key(run, member.name)
        if not key.is_file():
            raise ConfigError(
                f"{key} is missing: the private key of {member.name}; copy it there, or give --key"
            )
    if len({member.config.stages for member in members}) > 1 and args.spread:
        raise ConfigError("--spread takes replicas of one number of stages; write a file for each kind")
    keyed = ["--key", os.path.abspath(args.key)] if args.key else []
    tasks = [
        Task(
            [args.bucket, "--replica", member.name, *keyed, *_placed(args), *_threads(args, member), *extra],
            _state(args, run.recipe.name, member.name),
        )
        for member in members
    ]
    return run.recipe.name, members[0].name, tasks, members[0].config.stages


def _by_bundle(args: argparse.Namespace, extra: Sequence[str]) -> tuple[str, str, list[Task], int]:
    from isthmus.protocol.bundle import read_bundle

    bundle = read_bundle(Path(args.bucket))
    if args.spread:
        raise ConfigError(
            "--spread needs the run's URL, with --replica; by a file, give --stage N and --relay"
        )
    words = [os.path.abspath(args.bucket), *_placed(args), *extra]
    state = _state(args, bundle.run, bundle.replica)
    return bundle.run, bundle.replica, [Task(words, state)], 1


def _key(run: "RunInfo", name: str) -> Path:
    return Path("keys") / run.recipe.name / f"{name}.key"


def _check(args: argparse.Namespace, member: "Member") -> None:
    stages = member.config.stages
    if args.spread and (args.stage is not None or args.relay or stages < 2):
        raise ConfigError(
            f"--spread puts the stages of a pipelined replica on nodes of one job; {member.name} has {stages}"
            if stages < 2
            else "--spread runs all stages; leave --stage and --relay out"
        )
    if args.stage is not None and not 0 <= args.stage < stages:
        raise ConfigError(f"replica {member.name} has the stages 0 to {stages - 1}; there is no {args.stage}")


def _placed(args: argparse.Namespace) -> list[str]:
    """How one stage finds the others; `join` says what is wrong with an address."""
    if args.spread:
        return []
    if args.stage is None and (args.master or args.relay):
        raise ConfigError("--master and --relay are for stages in jobs of their own; give --stage N too")
    if args.stage is not None and bool(args.master) == bool(args.relay):
        raise ConfigError("--stage needs --master HOST:PORT, the address of stage 0, or --relay HOST:PORT")
    where = ["--master", args.master] if args.master else ["--relay", args.relay] if args.relay else []
    return [] if args.stage is None else ["--stage", str(args.stage), *where]


def _threads(args: argparse.Namespace, member: "Member") -> list[str]:
    """The job's cores, shared between its processes; --join may say otherwise, since it comes later."""
    alone = args.spread or args.stage is not None
    processes = 1 if alone else max(member.config.stages, member.config.processes)
    return ["--threads", str(max(1, args.cpus // processes))] if args.cpus else []


def _state(args: argparse.Namespace, run_name: str, replica: str) -> str:
    """Stages that see one file system would otherwise write into one folder."""
    folder = Path(os.path.abspath(args.state)) / run_name / replica
    return str(folder if args.stage is None else folder / f"stage-{args.stage}")


def _join_options(text: str) -> list[str]:
    """Options of `join`, looked at now: a job that cannot start is found out about hours later."""
    from isthmus.cli import join

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--join cannot be read: {error}") from None
    ours = ("--replica", "--key", "--work", "--stage", "--master", "--relay", "--grace", "--token")
    if taken := [word for word in words if word.partition("=")[0] in ours]:
        raise ConfigError(
            f"--join has {taken[0]}, which `isthmus slurm` sets itself; see isthmus slurm --help"
        )
    parser = _Parser(add_help=False)
    join.register(parser.add_subparsers())
    parser.parse_args(["join", "url", *words])
    return words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--join: {message}; see isthmus join --help")


def _write(file: Path, text: str) -> None:
    from isthmus.files import replace_file
    from isthmus.reading import read_note

    if file.exists() and not (read_note(file, 1 << 20) or "").startswith(HEAD):
        raise ConfigError(f"{file} is there, and not written by `isthmus slurm`; give another --file")
    try:
        replace_file(file, text, mode=0o755)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def _submit(file: Path) -> str:
    """The job's number."""
    how = {"capture_output": True, "text": True, "timeout": SUBMIT_SECONDS, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(["sbatch", "--parsable", "--", str(file)], **how)
    except FileNotFoundError:
        raise ConfigError(f"there is no sbatch here; submit {file} on a machine of the cluster") from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"sbatch has not answered for {SUBMIT_SECONDS:.0f} s; is Slurm up? Try squeue"
        ) from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RunError(f"sbatch refused {file}: {visible(why)}")
    return visible(done.stdout.strip().partition(";")[0])
