"""Requests of one round to the object store: when a process asks, and how many a whole fleet sends.

Both the plan and the protocol call these functions.
"""

from math import ceil

# Heartbeats
BEATS_A_ROUND = 5  # in a long round; in short ones a heartbeat comes every bucket.heartbeat_seconds
MOST_BEAT_SECONDS = 60.0  # between two heartbeats, unless the recipe states more

# Polls for the end of a round
SHORTEST_SECONDS, LONGEST_SECONDS = 0.2, 1.0  # between two polls, if rounds are short
EARLY = 0.05  # a round may end earlier than the previous ones by this share
NEAR, MOST_NEAR_SECONDS = 0.01, 10.0  # of a round: the longest pause once it is due, if above one second
FAR, LEAST_FAR_SECONDS, MOST_FAR_SECONDS = 0.1, 3.0, 60.0  # of a round: the longest pause before it is due
GROWTH = 0.7  # the next pause as a share of the time since the round was due

# Closers
STEP_IN_SECONDS = 3.0  # each next closer in line waits this much longer and polls this much less often
LONGEST_LOOK_SECONDS = 30.0  # between two polls of a closer far back in line
CLOCK_SECONDS = 300.0  # how long a reading of the store's clock stays valid
MOST_LISTED = 1000  # objects in one answer
READS = ("get", "head", "payload get")  # stores price these as reads and all others, listings too, as writes
READ_AT_ONCE = 16  # concurrent requests of one process that reads many objects


def beat_seconds(heartbeat_seconds: float, round_seconds: float) -> float:
    """Return the time between heartbeats in a round of this length: a few per round, not thousands."""
    return max(heartbeat_seconds, min(round_seconds / BEATS_A_ROUND, MOST_BEAT_SECONDS))


def pause_seconds(to_due: float, round_seconds: float) -> float:
    """Return the pause until the next poll, for a round of `round_seconds` that is due in `to_due` seconds
    (negative: overdue). Late notice costs a hundredth of a round, or a tenth if the round ends early."""
    to_due -= EARLY * round_seconds
    if to_due > SHORTEST_SECONDS:
        return min(to_due, max(LEAST_FAR_SECONDS, min(FAR * round_seconds, MOST_FAR_SECONDS)))
    longest = max(LONGEST_SECONDS, min(NEAR * round_seconds, MOST_NEAR_SECONDS))
    return min(longest, max(SHORTEST_SECONDS, -GROWTH * to_due))


def num_looks(waited: float, round_seconds: float, most_seconds: float = float("inf")) -> int:
    """Return how often a process polls in `waited` seconds for a round that ends on time, with pauses of at
    most `most_seconds`. The first poll comes after a pause."""
    looks, now = 1, min(pause_seconds(waited, round_seconds), most_seconds)
    while now < waited:
        now += min(pause_seconds(waited - now, round_seconds), most_seconds)
        looks += 1
    return looks


def round_requests(
    num_replicas: int,
    num_shards: int,
    *,
    round_seconds: float,
    wait_seconds: float,
    heartbeat_seconds: float = 3.0,
    num_closers: int = 2,
    num_processes: int | None = None,
    applied_shards: int | None = None,
) -> dict[str, float]:
    """Return the fleet's requests to the store in a usual round, by verb; "payload get" is separate.

    `wait_seconds`: how long a replica waits on average for the manifest after delivering its update.
    `num_processes` and `applied_shards` (the shards of one update that each process reads, summed) cover the
    whole fleet; by default every replica is one process.
    """
    processes = num_processes or num_replicas
    applied = num_replicas * num_shards if applied_shards is None else applied_shards
    beats = round_seconds / beat_seconds(heartbeat_seconds, round_seconds)
    attempts = num_looks(wait_seconds, round_seconds, LONGEST_SECONDS)
    line = sum(wait_seconds / min(STEP_IN_SECONDS * k, LONGEST_LOOK_SECONDS) for k in range(1, num_closers))
    pages = ceil(3 * num_replicas / MOST_LISTED)  # of heartbeats and the objects next to them
    clocks = num_closers * round_seconds / CLOCK_SECONDS
    own = applied / num_replicas  # a closer has already read what it applies when the round ends
    return {
        "create": num_replicas * (num_shards + 1) + 1,  # shards, commits, the manifest
        "put": num_replicas * beats + clocks,
        # everyone: the manifest; the closer: commits, requests to leave, the next membership document
        "get": num_replicas * (num_looks(wait_seconds, round_seconds) + 2) + (processes - num_replicas) + 1,
        "head": 1 + clocks,
        # commits and heartbeats by closers
        "list": attempts + line + pages * min(attempts, max(1.0, wait_seconds)),
        "payload get": (num_replicas - 1) * (num_shards + applied - own),
    }
