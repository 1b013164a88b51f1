"""`python -m isthmus.reproduce.worker`: one run after another, in one process that keeps what it compiled.

Each line of stdin is a run as JSON; each line of stdout is what came of it. The line of results is appended
here, so that a parent that dies loses nothing that is finished. Ends when stdin does.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from isthmus.config import parse_recipe
from isthmus.reproduce.lines import append


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    for text in sys.stdin:
        from isthmus.reproduce.trial import run_trial  # torch, for a worker that has something to do

        task = json.loads(text)
        try:
            recipe = parse_recipe(task["recipe"])
            line = run_trial(task["row"], task["scale"], recipe, task["device"], task["commit"])
            append(Path(task["file"]), line)
            answer = {key: value for key, value in line.items() if key not in ("curve", "recipe")}
        except Exception as error:  # whatever it was, the next run may fare better
            traceback.print_exc()
            answer = {"fault": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
