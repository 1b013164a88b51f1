"""Isthmus: pre-train one language model on machines that share no fast network."""

__version__ = "0.2.0"


def __getattr__(name: str):
    # torch loads only when a run is started, so that `isthmus --help` and `isthmus plan` answer at once.
    if name == "simulate":
        from isthmus.simulator.run import simulate

        return simulate
    if name == "train":
        from isthmus.runtime.train import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
