"""Decisions that settled rounds are void: how a run goes on when payloads that it counted are lost for good.

`repairs/<last>.json` says that rounds `first` to `last` are void, and that round last + 1 starts from
theta^(first - 1) again. A closer signs it, by `isthmus ledger repair`; nothing is ever skipped without one.

Whether a decision holds is not its signer's word. Until round last + 1 is settled a reader looks for itself:
some payload of round `first` must be lost, and no anchor may lead past it. Afterwards those who contributed
to round last + 1 speak for it, as they do for an anchor: they have signed where they started. Where they
started elsewhere, somebody still had the later state: the decision came too late, and is none.
"""

import re
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from isthmus.errors import Diverged, RunError
from isthmus.protocol.documents import REPAIR
from isthmus.protocol.schema import check
from isthmus.protocol.trust import MAX_DOCUMENT_BYTES, Refused, open_sealed
from isthmus.store import StoreRefused

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger

MOST_REPAIRS = 1000  # objects below repairs/, whoever wrote them


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Rounds `first` to `last` are void."""

    first: int
    last: int
    digest: str  # of theta^(first - 1): round last + 1 starts from it
    manifest: str  # digest of manifest `last`: the history that this is about
    reason: str
    closer: str = ""  # who signed it

    def to_dict(self) -> dict[str, Any]:
        body = asdict(self)
        del body["closer"]
        return body

    def __str__(self) -> str:
        rounds = (
            f"round {self.first} is" if self.first == self.last else f"rounds {self.first} to {self.last} are"
        )
        return f"{rounds} void by the decision of {self.closer} ({self.reason})"


class Repairs:
    """The decisions of one run. One listing, when it is first asked; a decision is read and looked into where
    a round that it may concern is asked for."""

    def __init__(self, ledger: "Ledger") -> None:
        self.ledger = ledger
        self.listed: list[int] | None = None  # their last rounds, newest first
        self.found: dict[int, Decision | None] = {}  # by last round; None: it does not hold
        self.ignored: dict[int, str] = {}  # why not

    def decision(self, round_number: int) -> Decision | None:
        """The decision by which a round is void, or None."""
        if self.listed is None:
            self.listed = self._list()
        for last in self.listed:
            if last < round_number:
                break
            found = self._look(last)
            if found and found.first <= round_number:
                return found
        return None

    def is_void(self, round_number: int) -> bool:
        return self.decision(round_number) is not None

    def decisions(self) -> list[Decision]:
        """All that hold, oldest first."""
        self.decision(0)
        return [found for last in sorted(self.listed or ()) if (found := self._look(last))]

    def refresh(self) -> None:
        """Look again at the next question: a decision may have been made, or have come too late."""
        self.listed, self.found, self.ignored = None, {}, {}

    def check(self, round_number: int, digest: str) -> None:
        """Diverged where theta^(round) is void, and what we hold is not what the run goes on from."""
        decision = self.decision(round_number)
        if decision and decision.digest != digest:
            raise Diverged(
                f"this replica holds another theta^({round_number}): {decision}; it must join anew from the "
                "bucket"
            )

    def decide(self, decision: Decision) -> bool:
        """Write a decision in our name; False where there is one for these rounds already."""
        body = decision.to_dict()
        check(body, REPAIR)
        sealed = self.ledger.signer.seal("repair", self.ledger.run.run_id, body)
        created = self.ledger.store.create(repair_key(decision.last), sealed)
        self.refresh()
        return created

    def _list(self) -> list[int]:
        try:
            keys = self.ledger.store.scan("repairs", most=MOST_REPAIRS)
        except StoreRefused as error:
            raise RunError(f"{error}; who can write there?") from None
        names = (re.fullmatch(r"repairs/([0-9]{6,7})\.json", key) for key in keys)
        rounds = {int(name[1]) for name in names if name}
        return sorted((t for t in rounds if repair_key(t) in keys), reverse=True)

    def _look(self, last: int) -> Decision | None:
        if last not in self.found:
            self.found[last] = None  # also while we look: anchors ask in turn which rounds are void
            try:
                decision = self._read(last)
                self._check(decision)
                self.found[last] = decision
            except Refused as reason:
                self.ignored[last] = str(reason)
        return self.found[last]

    def _read(self, last: int) -> Decision:
        run = self.ledger.at(last + 1)  # whose closers decide how it begins
        try:
            sealed = self.ledger.get_document(repair_key(last), MAX_DOCUMENT_BYTES)
        except StoreRefused as error:
            raise Refused(str(error)) from None
        closer, body = open_sealed(sealed or b"", "repair", run.run_id, run.keys)
        if closer not in run.closers:
            raise Refused(f"{closer} may not decide it")
        check(body, REPAIR)
        fields = {name: body[name] for name in REPAIR}
        decision = Decision(**fields, closer=closer)
        if decision.last != last or not 1 <= decision.first <= last:
            raise Refused("it is for other rounds")
        return decision

    def _check(self, decision: Decision) -> None:
        """Refused unless the decision holds; see the top of this file."""
        ledger = self.ledger
        begun, ended = ledger.manifest(decision.first), ledger.manifest(decision.last)
        if begun is None or ended is None or ended.digest != decision.manifest:
            raise Refused("it belongs to another history")
        if begun.anchor != decision.digest:
            raise Refused(f"it does not name the anchor that round {decision.first} began from")
        following = ledger.manifest(decision.last + 1)
        if following is not None:
            if following.anchor != decision.digest:
                raise Refused(f"it came too late: round {following.round} began from another anchor")
            try:
                ledger.check_witnessed(decision.last, decision.digest, decision.closer)
                return
            except Refused:
                pass  # too few speak for it, so we look for ourselves
        past = [t for t in ledger.believed_anchors(1) if decision.first <= t <= decision.last]
        if any(has_files(ledger, t) for t in past):
            raise Refused(f"the anchor of round {past[0]} leads past what was lost")
        if not ledger.lost_shards(begun, most=1):
            raise Refused(f"every payload of round {decision.first} can be read")


def has_files(ledger: "Ledger", anchor: int) -> bool:
    """Are all files of an anchor there? Whether they are what it states is found out by who reads them."""
    heads = [
        partial(ledger.is_object, f"anchors/{anchor:06d}/{i}.safetensors") for i in range(len(ledger.shards))
    ]
    return all(ledger.store.together(heads))


def repair_key(last: int) -> str:
    return f"repairs/{last:06d}.json"
