"""Upload theta^(t) to the bucket while the next rounds train."""

import threading
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from isthmus.protocol.ledger import Ledger


class AnchorUpload(threading.Thread):
    """One process's shards of an anchor. Once `read` is set, the caller may change the anchor."""

    def __init__(self, ledger: Ledger, round_number: int, shards: Mapping[int, Mapping[str, Tensor]]) -> None:
        super().__init__(daemon=True, name=f"anchor-{round_number}")
        self.ledger, self.round, self.shards = ledger, round_number, shards
        self.files: dict[int, str] = {}  # shard -> hash of the uploaded bytes
        self.digest = ""  # of the whole anchor, once the replica's processes have agreed on it
        self.read = threading.Event()
        self.fault: BaseException | None = None
        device = next(tensor.device for named in shards.values() for tensor in named.values())
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def run(self) -> None:
        try:
            self.upload()
        except BaseException as error:
            self.fault = error
        finally:
            self.read.set()

    def upload(self) -> None:
        # A separate stream: the training stream must not wait for copies to the host.
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            here = {
                i: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
                for i, named in self.shards.items()
            }
        self.read.set()
        for i in list(here):
            self.files[i] = self.ledger.put_anchor_shard(self.round, i, here.pop(i))

    def raise_fault(self) -> None:
        if self.fault is not None:
            raise self.fault
