"""Control messages on the wire: planner → rank, and rank or its agent process → planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eplb_service.attach import Attach, FromAgent, Gone
from eplb_service.control import (
    NO_RANK,
    NOT_RELAYED,
    Address,
    Arm,
    Armed,
    Committed,
    Copy,
    Disarm,
    Disarmed,
    Flipped,
    Hello,
    LayerChange,
    LinkBytes,
    Live,
    LiveLayer,
    Pulse,
    RefusalCode,
    Refused,
    Stage,
    Staged,
    Throttle,
    ToRank,
)
from eplb_service.errors import InvalidInputError
from eplb_service.ids import ChunkId, Epoch, GenerationNumber
from eplb_service.pb.v1 import agent_pb2, common_pb2
from eplb_service.rpc import fields
from eplb_service.rpc.convert_placement import row_from_pb, row_to_pb, shares_from_pb, shares_to_pb
from eplb_service.rpc.fields import (
    EPOCH_MAX,
    EXTENT_MAX,
    address_from_pb,
    address_to_pb,
    layer_from_pb,
    layer_to_pb,
    seconds,
    text,
    whole,
)

# ── planner → rank ───────────────────────────────────────────────────────────────────────────────────────────────────────


def to_rank_to_pb(value: ToRank) -> agent_pb2.ControlToAgent:
    """A message to a rank, on its agent process's control stream."""
    to = address_to_pb(value.to)
    match value:
        case Hello():
            hello = agent_pb2.Hello(epoch=whole("hello.epoch", value.epoch, most=EPOCH_MAX))
            return agent_pb2.ControlToAgent(address=to, hello=hello)
        case Stage():
            return agent_pb2.ControlToAgent(address=to, stage=_stage_to_pb(value))
        case Arm():
            return agent_pb2.ControlToAgent(address=to, arm=agent_pb2.Arm(chunk_id=_chunk("arm.chunk_id", value.chunk_id)))
        case Disarm():
            epoch = whole("disarm.epoch", value.epoch, most=EPOCH_MAX)
            disarm = agent_pb2.Disarm(chunk_id=_chunk("disarm.chunk_id", value.chunk_id), epoch=epoch)
            return agent_pb2.ControlToAgent(address=to, disarm=disarm)


def to_rank_from_pb(envelope: agent_pb2.ControlToAgent) -> ToRank:
    """A message to a rank. Raises InvalidInputError for an empty or unknown one, or a field that does not fit."""
    kind, to = envelope_kind(envelope), address_from_pb(envelope.address)
    if kind == "hello":
        return Hello(to=to, epoch=_epoch("hello.epoch", envelope.hello.epoch))
    if kind == "stage":
        return _stage_from_pb(envelope.stage, to)
    if kind == "arm":
        return Arm(to=to, chunk_id=_chunk("arm.chunk_id", envelope.arm.chunk_id))
    chunk = _chunk("disarm.chunk_id", envelope.disarm.chunk_id)
    return Disarm(to=to, chunk_id=chunk, epoch=_epoch("disarm.epoch", envelope.disarm.epoch))


def envelope_kind(envelope: agent_pb2.ControlToAgent | agent_pb2.ControlFromAgent) -> str:
    """Name of the message in an envelope. Raises InvalidInputError when there is none (a kind of a later release)."""
    kind = envelope.WhichOneof("message")
    if kind is None:
        raise InvalidInputError(f"message of rank {envelope.address.rank_id} is empty, or of a kind that this release lacks")
    return str(kind)


def _stage_to_pb(value: Stage) -> agent_pb2.Stage:
    layers = [
        agent_pb2.LayerChange(
            layer=layer_to_pb(change.layer, "stage.layers.layer"),
            old_digest=whole("stage.layers.old_digest", change.old_digest),
            new_digest=whole("stage.layers.new_digest", change.new_digest),
            new_row=row_to_pb("stage.layers.new_row", change.new_row),
            new_shares=shares_to_pb("stage.layers.new_shares", change.new_shares),
        )
        for change in value.layers
    ]
    copies = [
        agent_pb2.Copy(
            layer=layer_to_pb(copy.layer, "stage.copies.layer"),
            expert=whole("stage.copies.expert", copy.expert, most=EXTENT_MAX),
            source_rank=0 if copy.is_from_backup else fields.rank_id("stage.copies.source_rank", copy.source_rank),
            source_slot=whole("stage.copies.source_slot", copy.source_slot, most=EXTENT_MAX),
            target_rank=fields.rank_id("stage.copies.target_rank", copy.target_rank),
            target_slot=whole("stage.copies.target_slot", copy.target_slot, most=EXTENT_MAX),
            relay_of=whole("stage.copies.relay_of", copy.relay_of, most=EXTENT_MAX) if copy.is_relay else None,
            from_backup=copy.is_from_backup,
        )
        for copy in value.copies
    ]
    return agent_pb2.Stage(
        chunk_id=_chunk("stage.chunk_id", value.chunk_id),
        generation=whole("stage.generation", value.generation, least=1),
        weights_version=whole("stage.weights_version", value.weights_version),
        mesh_id=whole("stage.mesh_id", value.mesh_id),
        layers=layers,
        copies=copies,
        stage_timeout_s=seconds("stage.stage_timeout_s", value.stage_timeout_s, above_zero=True),
        arm_ttl_s=seconds("stage.arm_ttl_s", value.arm_ttl_s, above_zero=True),
        **_throttle_to_pb(value.throttle),
    )


def _throttle_to_pb(value: Throttle) -> dict[str, float]:
    given = {}
    if value.bytes_per_s:
        given["bytes_per_s"] = fields.number("stage.bytes_per_s", value.bytes_per_s, above=0.0)
    if value.time_share != 1.0:
        given["time_share"] = fields.number("stage.time_share", value.time_share, above=0.0, most=1.0)
    return given


def _throttle_from_pb(message: agent_pb2.Stage) -> Throttle:
    given = {}
    if message.HasField("bytes_per_s"):
        given["bytes_per_s"] = fields.number("stage.bytes_per_s", message.bytes_per_s, above=0.0)
    if message.HasField("time_share"):
        given["time_share"] = fields.number("stage.time_share", message.time_share, above=0.0, most=1.0)
    return Throttle(**given)


def _stage_from_pb(message: agent_pb2.Stage, to: Address) -> Stage:
    layers = tuple(
        LayerChange(
            layer=layer_from_pb(change.layer, f"stage.layers[{i}].layer"),
            old_digest=whole(f"stage.layers[{i}].old_digest", change.old_digest),
            new_digest=whole(f"stage.layers[{i}].new_digest", change.new_digest),
            new_row=row_from_pb(change.new_row, f"stage.layers[{i}].new_row"),
            new_shares=shares_from_pb(change, "new_shares", f"stage.layers[{i}]"),
        )
        for i, change in enumerate(message.layers)
    )
    copies = tuple(
        Copy(
            layer=layer_from_pb(copy.layer, f"stage.copies[{i}].layer"),
            expert=whole(f"stage.copies[{i}].expert", copy.expert, most=EXTENT_MAX),
            source_rank=NO_RANK if copy.from_backup else fields.rank_id(f"stage.copies[{i}].source_rank", copy.source_rank),
            source_slot=whole(f"stage.copies[{i}].source_slot", copy.source_slot, most=EXTENT_MAX),
            target_rank=fields.rank_id(f"stage.copies[{i}].target_rank", copy.target_rank),
            target_slot=whole(f"stage.copies[{i}].target_slot", copy.target_slot, most=EXTENT_MAX),
            relay_of=_relay_of(copy, f"stage.copies[{i}].relay_of"),
        )
        for i, copy in enumerate(message.copies)
    )
    return Stage(
        to=to,
        chunk_id=_chunk("stage.chunk_id", message.chunk_id),
        generation=GenerationNumber(whole("stage.generation", message.generation, least=1)),
        weights_version=whole("stage.weights_version", message.weights_version),
        mesh_id=ChunkId(whole("stage.mesh_id", message.mesh_id)),
        layers=layers,
        copies=copies,
        stage_timeout_s=seconds("stage.stage_timeout_s", message.stage_timeout_s, above_zero=True),
        arm_ttl_s=seconds("stage.arm_ttl_s", message.arm_ttl_s, above_zero=True),
        throttle=_throttle_from_pb(message),
    )


def _relay_of(copy: agent_pb2.Copy, field: str) -> int:
    return whole(field, copy.relay_of, most=EXTENT_MAX) if copy.HasField("relay_of") else NOT_RELAYED


# ── rank, and its agent process → planner ────────────────────────────────────────────────────────────────────────────────


def from_agent_to_pb(value: FromAgent) -> agent_pb2.ControlFromAgent:
    """What a rank, or its agent process, tells the planner."""
    if isinstance(value, Attach):
        ranks = [address_to_pb(rank) for rank in value.ranks]
        deployment = fields.deployment_id("attach.deployment", value.deployment)
        return agent_pb2.ControlFromAgent(attach=agent_pb2.Attach(deployment=deployment, ranks=ranks))
    sender = address_to_pb(value.sender)
    match value:
        case Live():
            return agent_pb2.ControlFromAgent(address=sender, live=_live_to_pb(value))
        case Flipped():
            return agent_pb2.ControlFromAgent(address=sender, flipped=_flipped_to_pb(value))
        case Pulse():
            return agent_pb2.ControlFromAgent(address=sender, pulse=_pulse_to_pb(value))
        case Gone():
            return agent_pb2.ControlFromAgent(address=sender, gone=agent_pb2.Gone(reason=text(value.reason)))
        case _:
            return _answer_to_pb(value, sender)


def _answer_to_pb(
    value: Staged | Refused | Armed | Committed | Disarmed, sender: common_pb2.Address
) -> agent_pb2.ControlFromAgent:
    """Answers about one chunk."""
    kind = type(value).__name__.lower()
    chunk = _chunk(f"{kind}.chunk_id", value.chunk_id)
    match value:
        case Staged():
            received = link_bytes_to_pb(value.received)
            staged = agent_pb2.Staged(chunk_id=chunk, seconds=seconds("staged.seconds", value.seconds), received=received)
            return agent_pb2.ControlFromAgent(address=sender, staged=staged)
        case Refused():
            reason = text(value.reason)
            refused = agent_pb2.Refused(chunk_id=chunk, code=value.code.value, reason=reason)
            return agent_pb2.ControlFromAgent(address=sender, refused=refused)
        case Armed():
            return agent_pb2.ControlFromAgent(address=sender, armed=agent_pb2.Armed(chunk_id=chunk))
        case Committed():
            committed = agent_pb2.Committed(chunk_id=chunk, boundary=whole("committed.boundary", value.boundary))
            return agent_pb2.ControlFromAgent(address=sender, committed=committed)
        case Disarmed():
            return agent_pb2.ControlFromAgent(address=sender, disarmed=agent_pb2.Disarmed(chunk_id=chunk))


def from_agent_from_pb(envelope: agent_pb2.ControlFromAgent) -> FromAgent:
    """What a rank, or its agent process, says. Raises InvalidInputError as `to_rank_from_pb` does."""
    kind = envelope_kind(envelope)
    if kind == "attach":
        return _attach_from_pb(envelope.attach)
    return _FROM_PB[kind](getattr(envelope, kind), address_from_pb(envelope.address))


def _attach_from_pb(message: agent_pb2.Attach) -> Attach:
    whole("attach.ranks", len(message.ranks), most=fields.RANK_ID_MAX + 1)
    ranks = tuple(address_from_pb(rank, f"attach.ranks[{i}]") for i, rank in enumerate(message.ranks))
    if len({address.rank_id for address in ranks}) < len(ranks):
        raise InvalidInputError(f"attach.ranks: {len(ranks)} addresses name a rank more than once")
    return Attach(deployment=fields.deployment_id("attach.deployment", message.deployment), ranks=ranks)


def _gone_from_pb(message: agent_pb2.Gone, sender: Address) -> Gone:
    return Gone(sender=sender, reason=text(message.reason))


def _staged_from_pb(message: agent_pb2.Staged, sender: Address) -> Staged:
    return Staged(
        sender=sender,
        chunk_id=_chunk("staged.chunk_id", message.chunk_id),
        seconds=seconds("staged.seconds", message.seconds),
        received=_link_bytes(message.received),
    )


def _armed_from_pb(message: agent_pb2.Armed, sender: Address) -> Armed:
    return Armed(sender=sender, chunk_id=_chunk("armed.chunk_id", message.chunk_id))


def _committed_from_pb(message: agent_pb2.Committed, sender: Address) -> Committed:
    boundary = whole("committed.boundary", message.boundary)
    return Committed(sender=sender, chunk_id=_chunk("committed.chunk_id", message.chunk_id), boundary=boundary)


def _disarmed_from_pb(message: agent_pb2.Disarmed, sender: Address) -> Disarmed:
    return Disarmed(sender=sender, chunk_id=_chunk("disarmed.chunk_id", message.chunk_id))


def link_bytes_to_pb(value: LinkBytes) -> common_pb2.LinkBytes:
    """Bytes by kind of link."""
    return common_pb2.LinkBytes(
        same_rank=whole("received.same_rank", value.same_rank),
        same_node=whole("received.same_node", value.same_node),
        cross_node=whole("received.cross_node", value.cross_node),
    )


def _link_bytes(message: common_pb2.LinkBytes) -> LinkBytes:
    return LinkBytes(
        same_rank=whole("received.same_rank", message.same_rank),
        same_node=whole("received.same_node", message.same_node),
        cross_node=whole("received.cross_node", message.cross_node),
    )


def _refused_from_pb(message: agent_pb2.Refused, sender: Address) -> Refused:
    codes = [code.value for code in RefusalCode]
    if message.code not in codes:
        raise InvalidInputError(f"refused.code: {message.code[:40]!r}; expected one of {', '.join(codes)}")
    reason = text(message.reason)
    chunk = _chunk("refused.chunk_id", message.chunk_id)
    return Refused(sender=sender, chunk_id=chunk, code=RefusalCode(message.code), reason=reason)


def _live_to_pb(value: Live) -> agent_pb2.Live:
    layers = [
        agent_pb2.LiveLayer(
            layer=layer_to_pb(live.layer, "live.layers.layer"),
            generation=whole("live.layers.generation", live.generation),
            digest=whole("live.layers.digest", live.digest),
            row=row_to_pb("live.layers.row", live.row),
            shares=shares_to_pb("live.layers.shares", live.shares),
        )
        for live in value.layers
    ]
    return agent_pb2.Live(
        epoch=whole("live.epoch", value.epoch, most=EPOCH_MAX),
        epoch_seen=whole("live.epoch_seen", value.epoch_seen, most=EPOCH_MAX),
        generation_seen=whole("live.generation_seen", value.generation_seen),
        closed_id=whole("live.closed_id", value.closed_id),
        flipped_id=whole("live.flipped_id", value.flipped_id),
        boundary=whole("live.boundary", value.boundary),
        weights_version=whole("live.weights_version", value.weights_version),
        voting=value.voting,
        off_reason=text(value.off_reason),
        layers=layers,
    )


def _live_from_pb(message: agent_pb2.Live, sender: Address) -> Live:
    whole("live.layers", len(message.layers), most=fields.LAYERS_MAX)
    layers = tuple(
        LiveLayer(
            layer=layer_from_pb(live.layer, f"live.layers[{i}].layer"),
            generation=GenerationNumber(whole(f"live.layers[{i}].generation", live.generation)),
            digest=whole(f"live.layers[{i}].digest", live.digest),
            row=row_from_pb(live.row, f"live.layers[{i}].row"),
            shares=shares_from_pb(live, "shares", f"live.layers[{i}]"),
        )
        for i, live in enumerate(message.layers)
    )
    return Live(
        sender=sender,
        epoch=_epoch("live.epoch", message.epoch),
        epoch_seen=_epoch("live.epoch_seen", message.epoch_seen),
        generation_seen=GenerationNumber(whole("live.generation_seen", message.generation_seen)),
        closed_id=ChunkId(whole("live.closed_id", message.closed_id)),
        flipped_id=ChunkId(whole("live.flipped_id", message.flipped_id)),
        boundary=whole("live.boundary", message.boundary),
        weights_version=whole("live.weights_version", message.weights_version),
        voting=message.voting,
        off_reason=text(message.off_reason),
        layers=layers,
    )


def _flipped_to_pb(value: Flipped) -> agent_pb2.Flipped:
    digests = [
        agent_pb2.RowDigest(layer=layer_to_pb(layer, "flipped.digests.layer"), digest=whole("flipped.digests.digest", digest))
        for layer, digest in value.digests
    ]
    return agent_pb2.Flipped(
        chunk_id=_chunk("flipped.chunk_id", value.chunk_id),
        boundary=whole("flipped.boundary", value.boundary),
        digests=digests,
        stall_s=seconds("flipped.stall_s", value.stall_s),
    )


def _flipped_from_pb(message: agent_pb2.Flipped, sender: Address) -> Flipped:
    whole("flipped.digests", len(message.digests), most=fields.LAYERS_MAX)
    digests = tuple(
        (layer_from_pb(entry.layer, f"flipped.digests[{i}].layer"), whole(f"flipped.digests[{i}].digest", entry.digest))
        for i, entry in enumerate(message.digests)
    )
    return Flipped(
        sender=sender,
        chunk_id=_chunk("flipped.chunk_id", message.chunk_id),
        boundary=whole("flipped.boundary", message.boundary),
        digests=digests,
        stall_s=seconds("flipped.stall_s", message.stall_s),
    )


def _pulse_to_pb(value: Pulse) -> agent_pb2.Pulse:
    return agent_pb2.Pulse(
        boundary=whole("pulse.boundary", value.boundary),
        idle=value.idle,
        voting=value.voting,
        off_reason=text(value.off_reason),
        windows_dropped=whole("pulse.windows_dropped", value.windows_dropped),
        weights_version=whole("pulse.weights_version", value.weights_version),
    )


def _pulse_from_pb(message: agent_pb2.Pulse, sender: Address) -> Pulse:
    return Pulse(
        sender=sender,
        boundary=whole("pulse.boundary", message.boundary),
        idle=message.idle,
        voting=message.voting,
        off_reason=text(message.off_reason),
        windows_dropped=whole("pulse.windows_dropped", message.windows_dropped),
        weights_version=whole("pulse.weights_version", message.weights_version),
    )


def _chunk(field: str, value: int) -> ChunkId:
    return ChunkId(whole(field, value, least=1))


def _epoch(field: str, value: int) -> Epoch:
    return Epoch(whole(field, value, most=EPOCH_MAX))


_FROM_PB: dict[str, Callable[[Any, Address], FromAgent]] = {
    "live": _live_from_pb,
    "staged": _staged_from_pb,
    "refused": _refused_from_pb,
    "armed": _armed_from_pb,
    "committed": _committed_from_pb,
    "flipped": _flipped_from_pb,
    "disarmed": _disarmed_from_pb,
    "pulse": _pulse_from_pb,
    "gone": _gone_from_pb,
}
