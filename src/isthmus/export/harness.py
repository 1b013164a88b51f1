"""The lm-evaluation-harness on an exported folder: an optional extra, loaded only here."""

from pathlib import Path
from typing import Any

from isthmus.data.manifest import file_sha256
from isthmus.errors import ConfigError, RunError
from isthmus.export.hf import MODELING
from isthmus.model.hf import CONFIG, read_json

# sha256 of the modeling_isthmus.py of earlier versions.
EARLIER_MODELING = ("e4df823842061b6c71bca1b717a103d62bbda261ac13a3df1fed95b17cab0eed",)  # 0.1


def require_harness() -> None:
    """Checked before anything is measured or exported for it."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--harness needs the lm-evaluation-harness; install it with: pip install 'isthmus[eval]'"
        ) from None


def run_harness(folder: Path, tasks: list[str], include: str | None, device: str) -> dict[str, Any]:
    """Scores by task, as the harness states them. `include`: a folder with tasks of one's own."""
    require_harness()
    import lm_eval
    from lm_eval.tasks import TaskManager

    code = needs_our_code(folder)
    manager = TaskManager(include_path=include)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise ConfigError(f'the harness has no task "{task}"; `lm_eval --tasks list` names them')
    try:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "trust_remote_code": code},
            tasks=tasks,
            task_manager=manager,
            device=device,
            bootstrap_iters=0,
        )
    except Exception as error:  # the harness raises all kinds: no network, no memory
        words = str(error).splitlines() or [type(error).__name__]
        raise RunError(f"the harness failed on {folder}: {words[0]:.300}") from error
    return {
        task: {name: value for name, value in scores.items() if isinstance(value, int | float)}
        for task, scores in found["results"].items()
    }


def needs_our_code(folder: Path) -> bool:
    """Whether the folder has a model file. Only one that an Isthmus wrote is run."""
    if not read_json(folder / CONFIG).get("auto_map"):
        return False
    found = folder / MODELING.name
    if not found.is_file() or file_sha256(found) not in (file_sha256(MODELING), *EARLIER_MODELING):
        raise ConfigError(f"{folder} contains code that Isthmus did not write; export the run again")
    return True
