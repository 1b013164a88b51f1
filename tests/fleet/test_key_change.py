"""A new key that was made on one machine of a replica's stages reaches the others."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from little import hasty as hasty
from owned import Owned, settled
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - it is public

from isthmus.errors import ConfigError
from isthmus.protocol.access import next_key
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Signer, new_secret, save_secret
from isthmus.replica.control_group import StageControlGroup
from isthmus.runtime.key_change import take_up_together

pytestmark = pytest.mark.usefixtures("hasty")


class Machines:
    """Two machines of replica c, whose key was replaced in round 2; the first has the new one."""

    def __init__(self, folder: Path) -> None:
        owned = Owned(str(folder / "bucket"), folder, closers=["a"])
        a, b, c = owned.replicas()
        settled(1, a, a, b, c)
        old, self.new = owned.rotate("c")
        settled(2, a, a, b, c)
        self.ledgers: list[Ledger] = []
        self.paths = [folder / f"machine-{number}" / "c.key" for number in (0, 1)]
        for path in self.paths:
            save_secret(path, old.secret, owned.run.digest)
            self.ledgers.append(owned.ledger("c"))
            self.ledgers[-1].membership.look()
            self.ledgers[-1].sign_as(old)
        save_secret(next_key(self.paths[0]), self.new.secret, owned.run.digest)

    def take_up(self) -> list[bool]:
        store = HashStore()
        groups = [StageControlGroup("c", rank, 2, store, timeout_seconds=120) for rank in (0, 1)]

        def one(rank: int) -> bool:
            return take_up_together(self.ledgers[rank], self.paths[rank], self.new.public_key, groups[rank])

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1)))


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_who_has_the_new_key_gives_it_to_the_other_machine(machines):
    assert machines.take_up() == [True, True]
    assert {ledger.signer.public_key for ledger in machines.ledgers} == {machines.new.public_key}
    assert machines.paths[1].read_bytes() == machines.paths[0].read_bytes()
    assert machines.paths[1].stat().st_mode & 0o777 == 0o600
    assert not any(next_key(path).exists() for path in machines.paths)


def test_where_no_machine_has_it_none_goes_on(machines):
    next_key(machines.paths[0]).unlink()
    before = [path.read_bytes() for path in machines.paths]
    assert machines.take_up() == [False, False]
    assert [path.read_bytes() for path in machines.paths] == before


def test_a_key_that_the_run_does_not_have_for_us_is_not_taken(machines, monkeypatch):
    wrong = Signer("c", new_secret())
    monkeypatch.setattr(type(machines.ledgers[0].signer), "secret", wrong.secret)
    assert machines.take_up() == [True, False]
    assert not next_key(machines.paths[1]).exists()


def test_another_key_that_waits_there_is_not_replaced(machines):
    save_secret(next_key(machines.paths[1]), new_secret())
    before = next_key(machines.paths[1]).read_bytes()
    with pytest.raises(ConfigError, match="is another key; delete it"):
        machines.take_up()
    assert next_key(machines.paths[1]).read_bytes() == before
