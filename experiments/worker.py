"""`python -m experiments.worker`: one run after another, in one process that keeps its compiled functions.

Each line of stdin is a job as JSON, one or more runs; each line of stdout is the outcome of a run. Results
are appended here, so that no finished run is lost when the parent dies. Ends when stdin does.
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
    os.dup2(2, 1)  # prints of libraries go to stderr
    for given in sys.stdin:
        from experiments.trial import run_trials  # loads torch, once there is a job

        task = json.loads(given)
        files = [Path(run["file"]) for run in task["runs"]]
        text = task["runs"][0]["text"]  # the same for all runs of a job
        try:
            recipes = [(run["row"], parse_recipe(run["recipe"])) for run in task["runs"]]
            for line in run_trials(recipes, task["scale"], task["device"], task["commit"], text):
                append(files.pop(0), line)
                answer = {key: value for key, value in line.items() if key not in ("curve", "recipe")}
                print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # of any kind: the next job may succeed
            traceback.print_exc()
            for _ in files:
                fault = {"fault": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(json.dumps(fault), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
