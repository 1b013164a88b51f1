"""The command line as a function."""

import pytest


@pytest.fixture
def isthmus(capsys):
    """Run the command in this process: isthmus("data", ...) -> (status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        from isthmus.cli.main import main

        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run
