"""Where the launchers of one replica meet, by the options of `isthmus join`, before anything is started."""

import time
from dataclasses import replace

from isthmus.config import Member
from isthmus.errors import ConfigError, Unreachable
from isthmus.replica.process_groups import own_address, resolve
from isthmus.runtime.addresses import Address, Meeting, Place, Places
from isthmus.runtime.gate import knock
from isthmus.runtime.handshake import Credentials
from isthmus.runtime.process import LauncherConfig


def find_places(config: LauncherConfig, member: Member, credentials: Credentials) -> Places:
    """Where the launchers of this replica meet, and where the stage after ours finds us."""
    stages = member.config.stages
    if config.stage is None:
        if given := (config.master and "--master") or (config.relay and "--relay"):
            raise ConfigError(f"{given} is for stages on several machines; give --stage too, or drop it")
        return Places()
    if not 0 <= config.stage < stages:
        raise ConfigError(
            f"replica {member.name} has the stages 0 to {stages - 1}; there is no stage {config.stage}"
        )
    if config.relay and (config.master or config.trust_network):
        raise ConfigError(
            "--relay takes the place of --master, and carries links over TLS only; drop --master and "
            "--trust-network, or --relay"
        )
    if config.relay:
        given = Address.parse(config.relay, "--relay", "192.0.2.10:29520")
        relay = Address(resolve(given.host), given.port)
        return Places(Meeting(relay, credentials, 0), Meeting(relay, credentials, config.stage))
    if not config.master:
        raise ConfigError(
            "--stage needs --master HOST:PORT, the address of stage 0, for example 10.0.0.2:29500; or "
            "--relay HOST:PORT, where the stages cannot reach each other"
        )
    given = Address.parse(config.master, "--master")
    master = Address(resolve(given.host), given.port)
    if config.stage == 0 or config.stage == stages - 1 or config.trust_network or master.here:
        return Places(master)
    return Places(master, Address(own_address(str(master), config.stage), master.port))


def secured_if_apart(config: LauncherConfig, places: Places) -> LauncherConfig:
    """Links between machines are made over TLS. Whether they are is told by the address of stage 0, which
    all stages know: one that only this machine reaches means that all of them are here.

    From here on names are numbers: they are resolved once.
    """
    if isinstance(places.master, Meeting):
        return replace(config, secured=True, relay=str(places.master.relay))
    if isinstance(places.master, Address):
        secured = not places.master.here and not config.trust_network
        return replace(config, secured=secured, master=str(places.master))
    return config


def check_backend(config: LauncherConfig, member: Member) -> None:
    if config.secured and member.config.backend == "nccl":
        raise ConfigError(
            f'replica {member.name} has backend "nccl", which neither encrypts nor authenticates between '
            "machines; pass --trust-network to all its stages where the network is closed to others, or "
            "leave `backend` out of the recipe"
        )


def find_master(master: Place | None, timeout_seconds: float, credentials: Credentials, stage: int) -> None:
    """A later stage looks for stage 0 before it starts anything."""
    assert master, "a later stage has a stage 0 elsewhere"
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            knock(master, credentials, stage)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"replica {credentials.signer.replica}: no stage 0 at {master} within "
                    f"{timeout_seconds:g} s ({error.strerror or 'no answer'}); start it there, or correct "
                    "--master or --relay"
                ) from None
            time.sleep(0.5)
