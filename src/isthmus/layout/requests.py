"""Requests of one round to the object store: when a process asks, and how often a whole fleet does.

The protocol goes by these functions, so the plan and the run count alike.
"""

from math import ceil

# Heartbeats
BEATS_A_ROUND = 5  # of a long round; in short ones a heartbeat comes every bucket.heartbeat_seconds
MOST_BEAT_SECONDS = 60.0  # between two heartbeats, unless the recipe states more

# The last lines of a process's log, which it adds to once a round
LOG_SECONDS = 5.0  # between two puts of them, at least

# Looks for the end of a round
SHORTEST_SECONDS, LONGEST_SECONDS = 0.2, 1.0  # between two looks, where rounds are short
EARLY = 0.05  # of a round: so much sooner than the last ones it may end
NEAR, MOST_NEAR_SECONDS = 0.01, 10.0  # of a round: the longest pause once it is due, if more than a second
FAR, LEAST_FAR_SECONDS, MOST_FAR_SECONDS = 0.1, 3.0, 60.0  # of a round: the longest pause before it is due
GROWTH = 0.7  # of the time since it was due: the next pause

# Closers
STEP_IN_SECONDS = 3.0  # the next closer in line waits this much longer, and looks this much less often
LONGEST_LOOK_SECONDS = 30.0  # between two looks of a closer that stands far back in line
CLOCK_SECONDS = 300.0  # a reading of the store's clock is good for so long
MOST_LISTED = 1000  # objects in one answer
READS = ("get", "head", "payload get")  # stores price them so; all else is a write, a copy and a listing too
READ_AT_ONCE = 16  # requests of one process that wait for their answers, where it reads many


def beat_seconds(heartbeat_seconds: float, round_seconds: float) -> float:
    """Between two heartbeats, where a round takes so long: a few in each round, not thousands."""
    return max(heartbeat_seconds, min(round_seconds / BEATS_A_ROUND, MOST_BEAT_SECONDS))


def pause_seconds(to_due: float, round_seconds: float) -> float:
    """Until the next look, where a round that takes `round_seconds` is due in `to_due` seconds, or was due
    so long ago. What a look too few costs is a hundredth of a round; if it ends early, a tenth, once."""
    to_due -= EARLY * round_seconds
    if to_due > SHORTEST_SECONDS:
        return min(to_due, max(LEAST_FAR_SECONDS, min(FAR * round_seconds, MOST_FAR_SECONDS)))
    longest = max(LONGEST_SECONDS, min(NEAR * round_seconds, MOST_NEAR_SECONDS))
    return min(longest, max(SHORTEST_SECONDS, -GROWTH * to_due))


def num_looks(waited: float, round_seconds: float, most_seconds: float = float("inf")) -> int:
    """How often somebody looks that waits so long for a round which comes when it is due; no pause is longer
    than `most_seconds`. The first look comes after a pause."""
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
    """What the whole fleet asks of the store in one usual round, by verb; "payload get" stands apart.

    `wait_seconds`: how long a replica waits for the manifest after it has delivered, on average.
    `num_processes` and `applied_shards` (what each of them reads of one update, summed up) are those of the
    whole fleet; without them every replica is one process.
    """
    processes = num_processes or num_replicas
    applied = num_replicas * num_shards if applied_shards is None else applied_shards
    beats = round_seconds / beat_seconds(heartbeat_seconds, round_seconds)
    attempts = num_looks(wait_seconds, round_seconds, LONGEST_SECONDS)
    line = sum(wait_seconds / min(STEP_IN_SECONDS * k, LONGEST_LOOK_SECONDS) for k in range(1, num_closers))
    pages = ceil(3 * num_replicas / MOST_LISTED)  # of heartbeats and what lies beside them
    clocks = num_closers * round_seconds / CLOCK_SECONDS
    own = applied / num_replicas  # a closer has read what it applies before the round ends
    return {
        "create": num_replicas * (num_shards + 1) + 1,  # shards, commits, the manifest
        "put": num_replicas * beats + clocks,
        # the manifest, commits by the closer, requests to leave, a replica's own heartbeat; by the closer the
        # next membership document
        "get": num_replicas * (num_looks(wait_seconds, round_seconds) + 3) + (processes - num_replicas) + 1,
        "copy": (num_replicas - 1) * num_shards + (num_closers - 1) * num_shards,
        "head": 1 + clocks,
        # commits and heartbeats by closers, and who asks to be admitted; who asks for help, by everybody
        "list": attempts + line + pages * min(attempts, max(1.0, wait_seconds)) + num_replicas + 1,
        "payload get": (num_replicas - 1) * (num_shards + applied - own),
    }
