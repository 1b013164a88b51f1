"""`python -m isthmus`, where the package was not installed: PYTHONPATH=src is enough."""

import sys

from isthmus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
