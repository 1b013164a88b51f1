"""The examples in deploy/ load, name what there is, and their commands are ones that Isthmus takes."""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from isthmus.cli.main import build_parser
from isthmus.config import load_recipe

DEPLOY = Path(__file__).parents[2] / "deploy"
USER = 10001


def command(words: list[str]) -> Any:
    """What our own parser makes of it; it would exit on an option that it does not know."""
    return build_parser().parse_args([str(word) for word in words])


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def seconds(text: str) -> float:
    return float(re.fullmatch(r"(\d+)s", text)[1])  # type: ignore[index]


def test_the_compose_file_runs_a_bucket_and_replicas_that_the_recipe_has():
    (found,) = documents("compose.yaml")
    services = found["services"]
    names = {member.name for member in load_recipe("demo").fleet()}
    joined = {}
    for name, service in services.items():
        if service["image"] == "isthmus" and "entrypoint" not in service:
            joined[name] = command(service["command"])
            assert service["restart"] in ("on-failure", "unless-stopped")
    replicas = {name: args for name, args in joined.items() if args.command == "join"}
    assert len(replicas) == 3
    for name, args in replicas.items():
        assert args.replica == name
        assert name in names
        assert 0 < args.grace_seconds < seconds(services[name]["stop_grace_period"])
    begun = command(shlex.split(services["setup"]["entrypoint"][2].partition("|| isthmus ")[2]))
    assert begun.command == "init"
    assert {args.url for args in replicas.values()} == {begun.url}
    port = next(args.port for args in joined.values() if args.command == "watch")
    assert services["watch"]["ports"] == [f"127.0.0.1:{port}:{port}"]  # for this machine only
    for service in services.values():
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in found["volumes"]
        for waited in service.get("depends_on", {}):
            assert waited in services


def test_the_kubernetes_job_comes_back_and_has_no_rights():
    claim, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = command(container["args"])
    assert args.command == "join"
    assert 0 < args.grace_seconds < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert args.url.startswith(f"{mounts['secret']}/")
    assert container["workingDir"] == mounts["work"]  # so that a state folder without a slash is kept
    assert args.work_dir == "state"
    (kept,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert kept["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod["securityContext"]["runAsUser"] == USER
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    # A failure policy asks for it; without the policy a start again would count as a failure.
    assert pod["restartPolicy"] == "Never"
    rules = {
        rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert rules["Ignore"]["onExitCodes"]["values"] == [75]
    assert rules["FailJob"]["onExitCodes"]["values"] == [2]


def test_the_skypilot_task_joins_by_a_file_that_it_carries():
    (task,) = documents("skypilot.yaml")
    assert task["resources"]["use_spot"] is True
    line = task["run"].strip().splitlines()[-1].replace("~", "/home/user")
    words = shlex.split(line)
    assert words[0] == "exec"
    args = command(words[2:])
    assert args.command == "join"
    assert args.url in {path.replace("~", "/home/user") for path in task["file_mounts"]}
    assert all(not value for value in task["envs"].values())  # no credentials in a file


def test_the_image_starts_isthmus_as_a_user_without_rights():
    found = instructions()
    kinds = [kind for kind, _ in found]
    assert kinds[0] == "ARG"
    assert [value for kind, value in found if kind == "FROM"] == ["${BASE} AS build", "${BASE}"]
    last = dict(found)  # the last of each kind counts
    assert last["ENTRYPOINT"] == '["isthmus"]'
    assert last["USER"] == f"{USER}:{USER}"
    assert kinds.index("USER") > max(at for at, kind in enumerate(kinds) if kind == "RUN")
    for _, value in (each for each in found if each[0] == "COPY" and not each[1].startswith("--from")):
        for source in value.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source
            kept = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
            assert f"!{source.removeprefix('./')}" in kept
