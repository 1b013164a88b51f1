"""`python -m experiments.worker`: one run after another, in one process that keeps what it compiled.

Each line of stdin is a job as JSON, one or more runs; each line of stdout is what came of a run. The line of
results is appended here, so that a parent that dies loses nothing that is finished. Ends when stdin does.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from experiments.lines import append
from isthmus.config import parse_recipe


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    for text in sys.stdin:
        from experiments.trial import run_trials  # torch, for a worker that has something to do

        task = json.loads(text)
        files = [Path(run["file"]) for run in task["runs"]]
        try:
            recipes = [(run["row"], parse_recipe(run["recipe"])) for run in task["runs"]]
            for line in run_trials(recipes, task["scale"], task["device"], task["commit"]):
                append(files.pop(0), line)
                answer = {key: value for key, value in line.items() if key not in ("curve", "recipe")}
                print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # whatever it was, the next job may fare better
            traceback.print_exc()
            for _ in files:
                fault = {"fault": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(json.dumps(fault), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
