"""The two ways Isthmus says no: what the user gave is wrong, or a run cannot go on."""


class ConfigError(ValueError):
    """Bad input: one line that says what is wrong and what would be right; exit status 2."""


class RunError(RuntimeError):
    """A fault at run time: one line that names the replica, stage, link or file; exit status 1."""


class RunStopped(RunError):
    """The run itself cannot be trusted or cannot go on: no restart would mend it."""


class Diverged(RunError):
    """This replica does not hold the anchor of the others: it must join anew from the bucket."""
