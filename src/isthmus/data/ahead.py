"""Batches on a device, read before they are needed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class ReadAhead:
    """The batch of an inner step, on `device`. For a GPU it reads the next batch into pinned memory while
    this one trains: a copy from other memory would make the host wait for the device."""

    def __init__(self, read: Callable[[int], Tensor], device: torch.device) -> None:
        self.read, self.device = read, device
        self.reader = ThreadPoolExecutor(1, "read-ahead")  # its thread starts with the first task
        self.ahead: tuple[int, Future[Tensor]] | None = None

    def at(self, inner_step: int) -> Tensor:
        """Return the step's batch as int64, on the device."""
        if self.device.type != "cuda":
            return self.read(inner_step).to(self.device).long()
        number, ready = self.ahead or (-1, None)
        # Replicas learn their batches at the end of a round: reading ahead past it is a LookupError.
        known = ready is not None and number == inner_step and ready.exception() is None
        tokens = ready.result() if ready and known else self._pinned(inner_step)
        self.ahead = inner_step + 1, self.reader.submit(self._pinned, inner_step + 1)
        return tokens.to(self.device, non_blocking=True).long()

    def _pinned(self, inner_step: int) -> Tensor:
        return self.read(inner_step).pin_memory()
