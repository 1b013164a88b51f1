"""Build one process's part of a replica: the whole model, or one stage or shard, with its links."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.runtime.addresses import LOOPBACK, Address
from isthmus.runtime.process import History, JoinConfig, Log

if TYPE_CHECKING:
    import torch

    from isthmus.config import Member
    from isthmus.data.tokens import Batches
    from isthmus.protocol.ledger import Ledger
    from isthmus.replica.base import Replica
    from isthmus.replica.control_group import ControlGroup
    from isthmus.runtime.leaving import Orders


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's place in its replica, from the environment variables of torchrun or our supervisor."""

    rank: int
    size: int
    master: Address  # where the processes of one machine meet
    local_rank: int
    local_size: int
    hosted: str  # the prefix in the store at `master`, if the store is torchrun's

    @classmethod
    def from_environment(cls) -> "Assignment":
        get = os.environ.get
        master = Address(get("MASTER_ADDR", LOOPBACK), int(get("MASTER_PORT", "0")))
        hosted = ""
        if get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            hosted = f"isthmus/{get('TORCHELASTIC_RESTART_COUNT', '0')}"
        rank, size = int(get("RANK", "0")), int(get("WORLD_SIZE", "1"))
        local = int(get("LOCAL_RANK", "0")), int(get("LOCAL_WORLD_SIZE", str(size)))
        return cls(rank, size, master, *local, hosted)


def compiles(config: JoinConfig, device: "torch.device") -> bool:
    """Whether this process compiles its part of the model: on a GPU, unless the config says otherwise."""
    from isthmus import gpu

    return gpu.usable(device) if config.compiled is None else config.compiled


def build_replica(
    config: JoinConfig,
    ledger: "Ledger",
    member: "Member",
    at: Assignment,
    batches: "Batches | None",
    device: "torch.device",
    precision: str,
    log: Log,
    orders: "Orders",
    history: History,
) -> tuple["Replica", "ControlGroup"]:
    """This process's part of the replica (the whole model, or one stage or shard of it) and its control
    group.

    Stage 0 and every process of a full replica have `batches`.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - it is public

    from isthmus.replica.control_group import SingleProcess, StageControlGroup
    from isthmus.replica.full import FullReplica, share_batches
    from isthmus.replica.leader import LeaderReplica
    from isthmus.replica.pipelined import PipelinedReplica
    from isthmus.replica.process_groups import open_store
    from isthmus.replica.stage import Stage
    from isthmus.runtime.leaving import LinkNote
    from isthmus.runtime.stage_links import CONTROL_TIMEOUT_FACTOR, StageLinks

    run = ledger.run
    recipe, whole = run.recipe.trained_by(member), member.config.kind == "full"
    compiled = compiles(config, device)
    if whole and device.type == "cuda":
        from isthmus.replica.picks import as_picked
        from isthmus.runtime.fits import cut_to_fit, device_memory

        member = cut_to_fit(as_picked(recipe, device), member, device_memory(device)[0])

    def full_replica(process_group: Any = None) -> FullReplica:
        assert batches is not None
        return FullReplica(
            recipe,
            member,
            batches,
            device=device,
            precision=precision,
            process_group=process_group,
            compiled=compiled,
        )

    if whole and at.size == 1:
        return full_replica(), SingleProcess()
    if not whole:
        links = StageLinks(config, ledger, member, at.rank, device, log, LinkNote(orders), history.error)
        ends, control = links.make(at.master, at.hosted)
        stage = Stage(recipe, member, at.rank, device=device, precision=precision, compiled=compiled)
        return PipelinedReplica(recipe, member, [stage], [ends], batches), control
    session = f"{run.run_id}/{member.name}"
    host, port = at.master.host, at.master.port
    store = open_store(
        replica=member.name, rank=at.rank, host=host, port=port, session=session, hosted=at.hosted
    )
    timeout_seconds = CONTROL_TIMEOUT_FACTOR * config.link_timeout_seconds
    control = StageControlGroup(member.name, at.rank, at.size, PrefixStore("control", store), timeout_seconds)
    if member.config.sharded:
        from isthmus.replica.sharded import ShardedReplica, shard_mesh  # FSDP takes a second to import

        assert batches is not None
        mesh = shard_mesh(PrefixStore("shards", store), at.rank, at.size, device)
        how: dict[str, Any] = {"device": device, "precision": precision, "compiled": compiled}
        return ShardedReplica(recipe, member, batches, mesh, control=control, **how), control
    replica = full_replica(share_batches(PrefixStore("batches", store), at.rank, at.size, device))
    if at.rank == 0:
        return LeaderReplica(replica, control, batches), SingleProcess()
    return replica, control
