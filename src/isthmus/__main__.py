"""The `isthmus` command, also as `python -m isthmus` where the package was not installed (PYTHONPATH=src is
enough). Ctrl-C is one line from here on: the commands themselves take a moment to load."""

import sys


def main() -> int:
    try:
        from isthmus.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("isthmus: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
