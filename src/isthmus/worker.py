"""`isthmus-worker FILE`: one process of a replica, for launchers with torchrun's contract.

It takes the options of `isthmus join`. torchrun, srun, Ray or a JobSet starts one per stage or process of the
replica, and restarts all of them if one fails.
"""

import os
import sys

from isthmus.__main__ import main as isthmus


def main() -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.argv[1:] = ["join", *sys.argv[1:], "--as-worker"]
    return isthmus()


if __name__ == "__main__":
    sys.exit(main())
