"""A Hugging Face dataset by name, streamed: it downloads only the documents that are read."""

from collections.abc import Iterator

from isthmus.data.readers import text_of, whole_characters
from isthmus.errors import ConfigError, RunError


class HubDataset:
    """One split of a dataset on the Hugging Face hub, given as NAME or NAME:CONFIG."""

    size = 0  # unknown
    consumed = 0

    def __init__(self, spec: str, split: str) -> None:
        self.dataset, _, self.config = spec.partition(":")
        self.split = split
        self.name = f"hf:{spec}/{split}"
        if not self.dataset:
            raise ConfigError(f"--hf is {spec!r}; expected NAME or NAME:CONFIG, such as allenai/c4:en")
        try:
            from datasets import load_dataset
        except ImportError:
            raise ConfigError("--hf needs the datasets package: pip install 'isthmus[hf]'") from None
        self._load = load_dataset

    def describe(self) -> dict:
        return {"name": self.name}

    def documents(self, field: str) -> Iterator[str]:
        try:
            rows = iter(self._load(self.dataset, self.config or None, split=self.split, streaming=True))
        except Exception as error:  # the hub raises many kinds, and all mean the same here
            raise ConfigError(f"cannot open {self.name}: {first_line(error)}") from error
        number = 0
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                reason = f"broke off after {number} documents: {first_line(error)}"
                raise RunError(f"{self.name} {reason}; the same command continues") from error
            if row is None:
                return
            number += 1
            if text := text_of(dict(row), field, f"{self.name}, document {number}"):
                yield whole_characters(text)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
