"""Removed commands, options and recipe keys, and what to use instead. Standard library only."""

from collections.abc import Sequence
from typing import Any

# By their first words: "logs" covers `isthmus logs ...`, "ledger repair" only that subcommand.
COMMANDS = {
    "ledger repair": "such a run ends; `isthmus ledger rebuild` writes weights for model.start",
    "slurm": "copy deploy/slurm.sh of the repository, and give it to sbatch (docs/places.md)",
    "reproduce": "in a checkout of the repository: `python -m experiments`",
    "rotate": "a new key is `isthmus revoke URL NAME`, then `isthmus invite URL NAME`",
    "members": "`isthmus status URL` lists them; `isthmus closers URL NAMES` names who closes rounds",
    "logs": "`isthmus status` shows each replica's last error; its whole log is on its own machine",
}

# As typed: "plan --scale"; for an option that takes a list of words, "--log mlflow".
OPTIONS = {
    "status --follow": "`isthmus watch URL` follows a run; in a terminal: watch -n 5 isthmus status URL",
    "watch --open": "open the URL that it prints",
    "doctor --replica": "give the replica's file, NAME.isthmus.toml, in place of the bucket",
    "plan --scale": "plan a larger fleet by --set replicas.NAME.count=N",
    "plan --check-mb-per-second": "a closer is taken to check 10 MB of updates a second",
    "plan --figure": "in a checkout of the repository: `python -m experiments figure NAME --to FILE`",
    "data prepare --encoding": "convert the files first, for example with iconv -f cp1252 -t utf-8",
    "--log mlflow": "take --log wandb, or `isthmus watch --tensorboard`",
    "join --master": "stages find each other by the bucket; --advertise HOST:PORT if a router forwards one",
    "join --wait": "a stage waits for its neighbours as long as it takes",
    "join --token": "a friend joins by the file that `isthmus invite` writes: isthmus join NAME.isthmus.toml",
    "invite --replica": "the name stands after the URL: isthmus invite URL NAME",
    "invite --days": "an invitation does not expire; `isthmus revoke` ends it",
}

# As in a recipe: "section.key", "replicas.key", or a whole "section".
KEYS: dict[str, str] = {
    "score": "closers no longer score updates; `isthmus ledger show RUN --usefulness` does, from the history",
    "bucket.sign_agreement": "updates are judged by their norm (bucket.norm_limit) and clipped (outer.clip)",
}


def gone_command(words: Sequence[str]) -> str:
    """Return the line for a removed command; empty for every other."""
    for name in (" ".join(words[:2]), words[0]):
        if cure := COMMANDS.get(name):
            return f'there is no command "{name}" any more: {cure}'
    return ""


def gone_option(option: str) -> str:
    """Return the line for a removed option; empty for every other."""
    cure = OPTIONS.get(option)
    return f"there is no {option} any more: {cure}" if cure else ""


def gone_key(key: str) -> str:
    """Return the line for a removed recipe key; empty for every other."""
    cure = KEYS.get(key)
    return f'there is no key "{key}" any more: {cure}' if cure else ""


def without_gone_keys(table: dict[str, Any]) -> dict[str, Any]:
    """Return a stored recipe's tables without the keys that this version has removed."""
    return {name: _kept(name, value) for name, value in table.items() if name not in KEYS}


def _kept(section: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(section, entry) for entry in value]
    if isinstance(value, dict):
        return {key: kept for key, kept in value.items() if f"{section}.{key}" not in KEYS}
    return value
