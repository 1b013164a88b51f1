"""Replay and score the anchor of every settled round on the run's GPU or a CPU."""

import contextlib
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.errors import ConfigError, RunError
from isthmus.layout.stages import EMBEDDING
from isthmus.model.llama import init_tensor
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.replay import MissingPayloads, Replay
from isthmus.replica.base import precision_dtypes
from isthmus.replica.evaluate import Scorer, rows_that_fit
from isthmus.runlog.row import Scores
from isthmus.subspace.boundaries import BasisSet

T = TypeVar("T")
Note = Callable[[str], None]
CPU = torch.device("cpu")


class Stopped(Exception):
    """The losses are no longer wanted."""


@dataclass(frozen=True, slots=True)
class ScoringDevice:
    """The device and settings for scoring."""

    device: torch.device = CPU
    dtype: torch.dtype | None = None  # of the stream; None: the dtype of the weights
    compiled: bool = False
    shared: bool = False  # with replicas that need its memory: score a few sequences at a time


def scoring_devices(device: torch.device, precision: str) -> list[ScoringDevice]:
    """Devices from the fastest to one that always works. A fleet on CPUs is scored on the CPU."""
    if device.type != "cuda":
        return [ScoringDevice()]
    on_gpu = ScoringDevice(device, precision_dtypes(precision)[1], shared=True)
    compiled = (
        [ScoringDevice(on_gpu.device, on_gpu.dtype, compiled=True, shared=True)] if gpu.usable(device) else []
    )
    return [*compiled, on_gpu, ScoringDevice(shared=True)]


class ScoredAnchor:
    """One anchor that follows the settled rounds at its own pace, and its held-out losses.

    Memory does not grow with the rounds that it lags. If one device of `where` fails, the next repeats the
    work from the bucket.
    """

    def __init__(
        self,
        ledger: Ledger,
        corpus: Corpus,
        where: list[ScoringDevice],
        note: Note,
        stopped: threading.Event | None = None,
    ) -> None:
        # A separate ledger: the recording thread reads from the other.
        self.ledger, self.corpus, self.note = Ledger(ledger.store, ledger.run), corpus, note
        self.recipe: Recipe = ledger.run.recipe
        self.where, self.stopped = list(where), stopped or threading.Event()
        self.held: Replay | None = None
        self.scorer: Scorer | None = None
        self.first_table: Tensor | None = None
        self.hasher = ThreadPoolExecutor(1, thread_name_prefix="digest")  # its thread starts with a task

    @property
    def replay(self) -> Replay:
        assert self.held is not None, "reach a round first"
        return self.held

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def somewhere(self, work: Callable[[], T]) -> T:
        """The result of `work`, which calls `reach` first; on the next device if this one fails."""
        while True:
            try:
                return work()
            except Exception as fault:
                if not self.may_move(fault):
                    raise
                words = (str(fault).splitlines() or [type(fault).__name__])[0]
                full = isinstance(fault, torch.OutOfMemoryError) or "out of memory" in words
            self._leave_place(words, full)  # here, since the exception kept the tensors alive

    def may_move(self, fault: Exception) -> bool:
        """Whether another device may succeed: no room, no compiler, a kernel that does not run."""
        return len(self.where) > 1 and not isinstance(fault, RunError | ConfigError | Stopped)

    def _leave_place(self, words: str, full: bool) -> None:
        left = self.where.pop(0)
        while full and len(self.where) > 1 and self.where[0].device == left.device:
            self.where.pop(0)
        self.held = self.scorer = self.first_table = None  # a step may be half done
        gc.collect()
        if left.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a failed GPU cannot do this either
                torch.cuda.empty_cache()
        if self.where[0].device == left.device:
            self.note(f"scoring goes on without compiling: {words}")
        else:
            why = f"{left.device} has no room for it" if full else words
            self.note(f"scoring goes on on the CPU, and takes longer: {why}")

    def reach(self, round_number: int) -> int:
        """Replay up to a settled round; return the round reached. It is later if payloads were swept and only
        an anchor leads further."""
        if self.held is None:
            device = self.where[0].device
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)  # kernels use this thread's current device
            self.held = Replay(self.ledger, max(0, round_number - 1), device=device)
        while self.held.round < round_number:
            self.check()
            try:
                if self.held.step() is None:
                    raise RunError(f"round {self.held.round + 1} was settled, and its manifest is gone")
            except MissingPayloads:
                if not self.held.jump_past():
                    raise
        return self.held.round

    def scores(self) -> Scores:
        """The scores of the current anchor."""
        scorer = self.scorer = self.scorer or self._make_scorer()
        scorer.bases.begin_round(self.replay.round)
        scores = scorer.score(self.replay.anchor, self._table(self.replay))
        self._give_back()
        return scores

    def _give_back(self) -> None:
        """Free cached memory if the GPU's is scarce: its replicas need what the forwards used."""
        if self.where[0].device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.where[0].device)
            if free < total // 4:
                torch.cuda.empty_cache()

    def _make_scorer(self) -> Scorer:
        here, dtype = self.where[0], self.replay.anchor[EMBEDDING].dtype
        return Scorer(
            self.recipe,
            self.corpus,
            BasisSet(self.recipe, here.device, dtype),
            here.device,
            here.dtype or dtype,
            rows=rows_that_fit(self.recipe, here.device) if here.shared else None,
            compiled=here.compiled,
            check=self.check,
        )

    def _table(self, replay: Replay) -> Tensor:
        """The embedding that compressed boundaries subtract."""
        anchor = replay.anchor[EMBEDDING]
        if self.recipe.subspace.adaptation:
            return anchor
        if self.first_table is None:  # then T_perp stays at its first value; see check_trainable
            shape = tuple(anchor.shape)
            self.first_table = init_tensor(EMBEDDING, shape, self.recipe.model, self.recipe.seed).to(anchor)
        return self.first_table

    def with_digest(self, scores: Callable[[], Scores | None]) -> tuple[Scores | None, str]:
        """Scores and the anchor's digest, which the host computes while a GPU scores."""
        if self.where[0].device.type != "cuda":
            return scores(), self.replay.digest()
        torch.cuda.synchronize(self.where[0].device)  # wait for the step
        digest = self.hasher.submit(self._digest_beside)
        return scores(), digest.result()

    def _digest_beside(self) -> str:
        """The digest on a separate stream, so that it does not queue behind the forwards."""
        with torch.cuda.stream(torch.cuda.Stream(self.where[0].device)):
            return self.replay.digest()
