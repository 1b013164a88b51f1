"""The `isthmus` command, also as `python -P -m isthmus` without installing the package (PYTHONPATH=src is
enough). Ctrl-C prints one line from here on, even while the commands are still loading.

No module may be imported from the current folder: it often holds other people's files, and a `numpy.py` among
them would run. The installed command never looks there, and we start our own children with `-P`.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Without -P, Python has put that folder first. Modules imported until here (this package, some of
    # Python's own) could have come from there; only -P prevents that.
    del sys.path[0]

import os

if len(paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)) > 1 and "" in paths:
    # Python reads an empty entry as that folder, and `PYTHONPATH=$PYTHONPATH:/more` leaves one by accident.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path[:] = [path for path in sys.path if path != os.getcwd()]


def main() -> int:
    os.environ["PYTHONSAFEPATH"] = "1"  # for subprocesses of libraries: torch probes the CPU by `python -c`
    try:
        from isthmus.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("isthmus: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
