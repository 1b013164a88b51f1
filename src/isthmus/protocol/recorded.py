"""The rows of a run from its bucket alone: the replicas' reports with their updates."""

from isthmus.protocol.ledger import Ledger
from isthmus.runlog.facts import Facts
from isthmus.runlog.held_out import HeldOutLosses
from isthmus.runlog.row import Row


def bucket_rows(ledger: Ledger) -> list[Row]:
    """Row 0 and one row per settled round, without a replay, with the held-out losses that a member has
    measured."""
    recipe, last = ledger.run.recipe, ledger.last_round()
    rows, losses = [Row.untrained(recipe, None, 0.0)], HeldOutLosses()
    for manifest in ledger.between(1, last):
        rows.append(Row.from_manifest(recipe, manifest, rows[-1].tokens))
        losses.add(manifest)
    if last:
        ended = farewells(ledger)
        rows[-1].add_farewells(recipe, ended)
        for name, facts in ended.items():
            losses.add_facts(name, facts, last)
    return [losses.filled(row) for row in rows]


def farewells(ledger: Ledger) -> dict[str, Facts]:
    """What ended replicas counted after their last commits."""
    beats = {member.name: ledger.heartbeat(member.name) for member in ledger.run.recipe.fleet()}
    return {name: beat[0].farewell for name, beat in beats.items() if beat and beat[0].gone}
