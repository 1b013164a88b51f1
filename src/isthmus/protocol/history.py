"""How far a run has come, and who speaks for its anchors."""

import re
from collections.abc import Iterable

from isthmus.errors import RunStopped
from isthmus.protocol.chain import Chain, manifest_key
from isthmus.protocol.trust import Refused

LISTED = 500  # a history of so many rounds is listed whole: that is one request
MOST_CLAIMS = 4  # that are tried
WITNESS_ROUNDS = 10  # whoever contributed to one of the last so many rounds has a say on an anchor


class History(Chain):
    """The settled rounds of one run."""

    def last_round(self, claims: Iterable[int] = ()) -> int:
        """The newest settled round; 0 before the first. In a few requests, however many rounds there are.

        A short history is listed: that is one request, and shows what is missing in it. In a long one the
        manifests from a round that is there up to the last follow each other, so doubling steps find it.
        `claims` are rounds that replicas say they have reached: where to begin, and nothing more. What is
        found so counts only if more than half of all replicas have signed that they took part in it, since
        one closer could put manifests of its own far ahead. Else all are listed.
        """
        rounds, known = self.run.recipe.outer.rounds, max(self.newest, LISTED)
        likely = sorted({t for t in claims if known < t <= rounds}, reverse=True)[:MOST_CLAIMS]
        likely += [known + 1] if known < rounds else []
        low = next((t for t in likely if self._is_there(t)), self.newest)
        if low <= LISTED:
            return self._last_listed()
        newest = self._last_after(low)
        if newest > self.newest and not self._took_part_in(newest):
            return self._last_listed()
        self.newest = max(self.newest, newest)
        return self.newest

    def _last_after(self, low: int) -> int:
        """The last of the manifests that follow each other from `low`, which is there."""

        def there(t: int) -> bool:
            return t <= self.run.recipe.outer.rounds and self._is_there(t)

        step = 1
        while there(low + step):
            low, step = low + step, 2 * step
        while step > 1:
            step //= 2
            low += step if there(low + step) else 0
        return low

    def _took_part_in(self, round_number: int) -> bool:
        """Have more than half of all replicas signed for this round?"""
        if not self.run.commits_in_manifests:
            return False
        try:
            data = self._get(round_number)
            manifest = self._checked(data or b"", round_number, None)
        except RunStopped:
            return False  # it is said when that round is read
        self._stash(round_number, data or b"")
        return 2 * len(manifest.entries) > len(self.membership.epoch(manifest.epoch).run.keys)

    def _last_listed(self) -> int:
        """By the listing: whatever has a later name is not of the chain. But a manifest that is signed and
        beyond a gap tells that those in the gap are gone."""
        keys = set(self.store.list("manifests/"))
        found = {int(m[1]) for key in keys if (m := re.fullmatch(r"manifests/([0-9]{6,7})\.json", key))}
        found -= {t for t in found if manifest_key(t) not in keys}  # 0000003.json is no name of ours
        newest = self.newest
        rounds = self.run.recipe.outer.rounds
        while newest < rounds and (newest + 1 in found or self._is_there(newest + 1)):
            newest += 1  # a listing may lag behind
        for t in sorted(t for t in found if newest + 1 < t <= rounds)[:10]:
            data = self._get_early(t)
            if data and self._is_signed(data, t):
                raise RunStopped(f"manifest {newest + 1} of this run is gone, before {t}; the run stops here")
        self.newest = newest
        return newest

    def _is_there(self, round_number: int) -> bool:
        return self.store.head(manifest_key(round_number)) is not None

    def settled_at(self, round_number: int, deadline: float | None = None) -> float | None:
        """When round `round_number` was settled, by the store's clock; for 0, when the run was created."""
        key = "run.json" if round_number == 0 else manifest_key(round_number)
        info = self.store.head(key, deadline=deadline)
        return info.modified_unix_seconds if info else None

    # Who speaks for an anchor

    def check_witnessed(self, round_number: int, digest: str, writer: str) -> str:
        """Who says that theta^(t) has this digest, in words; Refused where it is the word of `writer` alone.

        Every contributor to round t + 1 has signed the digest of the anchor that it started from. More than
        half of those who contributed lately must have: a closer can leave out whom it likes.
        """
        first = max(1, round_number + 2 - WITNESS_ROUNDS)
        if round_number < self.newest and self.run.commits_in_manifests:
            self.expect(round_number + 1)
            self.manifest(first)  # and all that are needed, at a time
        following = self.manifest(round_number + 1)
        if following is None:
            raise Refused(f"{writer} alone speaks for it: round {round_number + 1} is not settled yet")
        if following.anchor != digest:
            raise Refused(f"{writer} wrote another one than round {round_number + 1} began from")
        if not self.run.commits_in_manifests:
            return f"closer {following.closer}, in manifest {round_number + 1}"
        known = self.between(first, round_number + 1)
        electorate = {entry.replica for manifest in known for entry in manifest.entries}
        electorate &= self.at(round_number + 1).keys.keys()  # who was revoked has no say
        signed = {entry.replica for entry in following.entries}
        words = f"{len(signed)} of {len(electorate)} contributors"
        if 2 * len(signed) <= len(electorate):
            raise Refused(f"{writer} wrote it, and only {words} have signed its digest")
        return f"{words}, in round {round_number + 1}"
