"""The store is killed for a while in the middle of a run, and the run goes on.

    python bench/outage.py [--seconds 20] [--rounds 12]

A real S3 server (SeaweedFS), a real fleet (a full replica and a pipelined one of two stages); after a few
rounds the server is killed, stays away, and comes back on the same disk. At the end every round must be
there, and replaying the bucket must give every digest that was stated. Exit status 1 when anything fails.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from isthmus import train
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.replay import Replay

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import servers  # the tests' own SeaweedFS
from small_recipes import EDGE, RACK, recipe_text

RECIPE = recipe_text(RACK + EDGE, name="outage", outer={"inner_steps": 10})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the store is away")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "server"
        disk.mkdir()
        server = servers.start_seaweed(disk)
        if isinstance(server, str):
            print(server, file=sys.stderr)
            return 1
        os.environ |= servers.admins_environment(server.endpoint)
        url = f"s3://{servers.BUCKET}/outage"
        recipe = parse_recipe(RECIPE, [f"outer.rounds={args.rounds}", f'bucket.url="{url}"'])
        run_dir = Path(folder) / "run"
        away = threading.Thread(target=outage, args=(server, run_dir, args.seconds), daemon=True)
        away.start()
        results = train(recipe, run_dir, device="cpu")
        away.join()
        ledger = open_ledger(url)
        replay = Replay(ledger)
        while replay.step() is not None:
            pass
        slowest = max(results.rows[1:], key=lambda row: row["seconds"])
        print(
            f"store away for {args.seconds:g} s; {replay.round} of {args.rounds} rounds settled; the "
            f"slowest, round {slowest['round']}, took {slowest['seconds']:.1f} s; all digests match on replay"
        )
        server.kill()
        return 0 if replay.round == args.rounds else 1


def outage(server: servers.Server, run_dir: Path, seconds: float) -> None:
    """Wait for the third row, then take the store away."""
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        time.sleep(0.1)
    server.kill()
    print(f"store killed for {seconds:g} s", file=sys.stderr)
    time.sleep(seconds)
    server.start()
    print("store started again", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
