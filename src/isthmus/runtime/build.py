"""What one process of a replica trains: the whole model, or one stage or shard of it, with its links."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.runtime.process import LauncherConfig

if TYPE_CHECKING:
    import torch

    from isthmus.config import Member
    from isthmus.data.tokens import Batches
    from isthmus.protocol.ledger import RunInfo
    from isthmus.replica.base import Replica
    from isthmus.replica.control_group import ControlGroup

# Of a link's time-out: between inner steps a stage may be uploading, so the others wait longer for it.
CONTROL_TIMEOUT_FACTOR = 30


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the elastic agent assigns to a worker, by environment variables; nothing else reads them."""

    rank: int
    size: int
    master: str

    @classmethod
    def from_environment(cls) -> "Assignment":
        get = os.environ.get
        master = f"{get('MASTER_ADDR', '127.0.0.1')}:{get('MASTER_PORT', '0')}"
        return cls(int(get("RANK", "0")), int(get("WORLD_SIZE", "1")), master)


def compiles(config: LauncherConfig, device: "torch.device") -> bool:
    """Is this process's part of the model compiled? On a GPU, unless told otherwise."""
    from isthmus import gpu

    return gpu.usable(device) if config.compiled is None else config.compiled


def build_replica(
    config: LauncherConfig,
    run: "RunInfo",
    member: "Member",
    at: Assignment,
    batches: "Batches | None",
    device: "torch.device",
    precision: str,
) -> tuple["Replica", "ControlGroup"]:
    """This process's part of the replica (the whole model, or one stage or shard of it) and its control
    group.

    Stage 0 and every process of a full replica have `batches`.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - it is public

    from isthmus.protocol.trust import load_signer
    from isthmus.replica.control_group import SingleProcess, StageControlGroup
    from isthmus.replica.full import FullReplica, share_batches
    from isthmus.replica.leader import LeaderReplica
    from isthmus.replica.pipelined import PipelinedReplica
    from isthmus.replica.process_groups import connect, open_store, own_address
    from isthmus.replica.stage import Stage
    from isthmus.runtime.handshake import Credentials
    from isthmus.runtime.link_proof import prove_link

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
    store, address = open_store(
        replica=member.name, stage=at.rank, master=at.master, session=f"{run.run_id}/{member.name}"
    )
    timeout_seconds = CONTROL_TIMEOUT_FACTOR * config.link_timeout_seconds
    control = StageControlGroup(member.name, at.rank, at.size, PrefixStore("control", store), timeout_seconds)
    if member.config.sharded:
        from isthmus.replica.sharded import ShardedReplica, shard_mesh  # FSDP takes a second to import

        assert batches is not None
        mesh = shard_mesh(PrefixStore("shards", store), at.rank, at.size, device)
        how = {"device": device, "precision": precision, "compiled": compiled}
        return ShardedReplica(recipe, member, batches, mesh, **how), control
    if whole:
        replica = full_replica(share_batches(PrefixStore("batches", store), at.rank, at.size, device))
        return (
            (LeaderReplica(replica, control, batches), SingleProcess())
            if at.rank == 0
            else (replica, control)
        )
    if config.master:
        address = own_address(config.master, at.rank)
    credentials = Credentials(run.run_id, load_signer(Path(config.key), member.name), Path(config.key))
    common: dict[str, Any] = {
        "stage": at.rank,
        "num_stages": at.size,
        "store": PrefixStore("links", store),
        "address": address,
        "device": device,
        "timeout_seconds": config.link_timeout_seconds,
    }
    if config.secured:
        from isthmus.runtime.stage_links import connect_as_told

        before, after = connect_as_told(config, credentials, **common)
    else:
        before, after = connect(
            replica=member.name,
            backend=member.config.backend,
            prove=lambda link: prove_link(link, credentials),
            **common,
        )
    stage = Stage(recipe, member, at.rank, device=device, precision=precision, compiled=compiled)
    return PipelinedReplica(recipe, member, [stage], [(before, after)], batches), control
