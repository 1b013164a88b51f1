"""Make bucket.tar.gz next to this file, once: `python -P tests/compat/v0.3/make.py` from the root of 0.3.

A finished run of four rounds with every kind of document: an invited replica, a skip, a refusal, an anchor.
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "src"), str(HERE.parents[1] / "support")]

from clocks import Clock  # noqa: E402
from little import apply, closes, give  # noqa: E402
from owned import MORE, Owned, settled  # noqa: E402

from isthmus.protocol import closer as closer_module  # noqa: E402
from isthmus.protocol.documents import StageDocument  # noqa: E402
from isthmus.protocol.heartbeat import Heartbeat  # noqa: E402
from isthmus.protocol.replay import Replay  # noqa: E402

RECIPE = MORE.replace("rounds = 30", "rounds = 4").replace("vocab = 64", "vocab = 32")


def main() -> None:
    closer_module.STEP_IN_SECONDS = 0.0
    with tempfile.TemporaryDirectory() as folder:
        owned = Owned(str(Path(folder, "bucket")), Path(folder), RECIPE, ["a"])
        a, b, c = owned.replicas(Clock())
        for each in (a, b, c):
            each.beat()
        settled(1, a, a, b, c)
        give(2, a, b)
        c.exchange.skip(2, "not_finite")
        owned.invite("d", table={"kind": "full"})
        assert closes(a, 2)
        apply(2, a, b, c)
        d = owned.comes("d", 2)
        give(3, a, b, d)
        c.deliver_as(3, c.update(scale=100.0))
        assert closes(a, 3)
        apply(3, a, b, c, d)
        settled(4, a, a, b, c, d)
        for each in (a, b, c, d):
            each.ledger.beat(Heartbeat(state="finished", incarnation="2", round=4, holds=4))
        b.ledger.beat(Heartbeat(state="waiting", incarnation="2", awaiting="nothing"))
        c.ledger.ask_to_leave("2")
        stage = StageDocument(stage=1, start=1, addresses=("192.0.2.7:29500",))
        c.ledger.store.put("members/c/stage-1.json", c.ledger.signer.seal("stage", owned.run.run_id, stage))
        digests = []
        for t in range(5):
            replay = Replay(owned.ledger())
            while replay.round < t:
                replay.step()
            digests.append(replay.digest())
        (HERE / "digests.json").write_text(json.dumps(digests, indent=2) + "\n")
        with tarfile.open(HERE / "bucket.tar.gz", "w:gz") as archive:
            archive.add(Path(folder, "bucket"), "bucket")


if __name__ == "__main__":
    main()
