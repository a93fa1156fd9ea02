"""What planner, agent process and hook say to one another about ranks and chunks: plain values, no wire format.

`rpc/convert.py` maps them to protobuf, `agent/frames.py` to the frames of the Unix socket; the state machines
(`rollout`, `agent.session`, `agent.hook.chunk`) know only these. Every message names the rank, its incarnation and its
group, so that what belongs to an earlier life of a process, or an earlier forming of the group, is recognised and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from eplb_service.ids import ChunkId, DeploymentId, Epoch, GenerationNumber, GroupId, Incarnation, LayerRef, Phase, RankId

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 3
PROTOCOL_VERSION_OF_SHARES = 2
"""The first in which layers come with shares. Ranks with weighted dispatch need it; for all others 1 and 2 are the same."""
PROTOCOL_VERSION_OF_RELAYS = 3
"""The first in which a rank passes on what a copy brings to it (`Copy.relay_of`). Where a rank is older, every copy crosses."""

NO_RANK = RankId(-1)
"""`Copy.source_rank` of a copy that no rank gives."""

NOT_RELAYED = -1
"""`Copy.relay_of` of a copy from a live slot."""

CAPABILITY_RESTORE = "restore"
"""Word of `Registration.capabilities`: the rank can take experts that no rank holds from a backup of its own."""

PLANNER_PORT = 7470
"""Where a planner serves and its clients look, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Address:
    """One life of one rank in one forming of its group."""

    rank_id: RankId
    incarnation: Incarnation
    group_id: GroupId


# ── registration: what a rank is ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """One MoE layer. slots: slots per rank; expert_bytes: bytes of all tensors of one expert."""

    layer_id: int
    num_logical: int
    slots: int
    expert_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """What the tensors of an expert are, of layers in which they are alike.

    tensors: name, and type, shape (without the slot axis), kind and layout in words; ascending by name.
    """

    layer_ids: tuple[int, ...]
    tensors: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One model of a deployment (target, drafter). digest: of its architecture and checkpoint identity; equal on all ranks.

    manifest_digest: of names, dtypes, shapes (without the slot axis), kinds and layouts of every tensor of an expert, by layer.
    tensors: what it is the digest of, to say in which tensor two ranks differ; may be left out.
    """

    name: str
    digest: str
    manifest_digest: str
    layers: tuple[LayerInfo, ...]
    tensors: tuple[LayerTensors, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a rank says of itself when its hook starts, and again on every reconnect.

    group_rank_ids: stable ids of all ranks of the group, in column order of placements.
    capacity: relative speed (1 = as the others). dispatch: see `dispatch.Dispatch`.
    nic: NIC, or rail, by which it reaches other nodes; ranks of a node that share it name it alike. Empty = its own.
    vote_period: K, steps between votes. window_steps: W, steps of a load window. sub_windows: parts of a window.
    staging_bytes: budget that staging was allocated with; 0 = observe only.
    replica_table_width: most replicas of an expert that the engine's tables can hold.
    """

    deployment: DeploymentId
    address: Address
    node: str
    group_rank_ids: tuple[RankId, ...]
    phase: Phase
    stage: int
    models: tuple[ModelInfo, ...]
    capacity: float
    dispatch: str
    vote_period: int
    window_steps: int
    sub_windows: int
    staging_bytes: int
    replica_table_width: int
    weights_version: int
    capabilities: tuple[str, ...] = ()
    nic: str = ""
    protocol_min: int = PROTOCOL_VERSION_MIN
    protocol_max: int = PROTOCOL_VERSION_MAX


# ── planner → rank ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A planner of this epoch leads now: refuse lower epochs, close their chunks, then reply with what is live."""

    to: Address
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """New row of one layer. Digests are `placement.row_digest`. new_row: length P, -1 = empty.

    new_shares: under weighted dispatch the share of its expert's tokens that each slot takes, length P, float32 values; the
    row may then be the one that is live already.
    """

    layer: LayerRef
    old_digest: int
    new_digest: int
    new_row: tuple[int, ...]
    new_shares: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One expert's tensors go from one rank to a slot of another, or the same, rank. Slots are local.

    relay_of: -1 = the source is a live slot, `source_slot`. Else it is the expert that an earlier copy of the chunk brings into
    the staging of `source_rank`: the index of that copy in `Stage.copies`. Then `source_slot` is that copy's target slot, which
    holds another expert until the flip. A relay is of a copy from a live slot (never of another relay), comes after it in the
    list, and may end on its own source rank (where the expert fills a second slot).

    source_rank: -1 = no rank: the target takes the expert from a backup of its own (host memory, checkpoint), and `source_slot`
    is 0.
    """

    layer: LayerRef
    expert: int
    source_rank: RankId
    source_slot: int
    target_rank: RankId
    target_slot: int
    relay_of: int = NOT_RELAYED

    @property
    def is_from_backup(self) -> bool:
        """Whether no rank gives it."""
        return self.source_rank == NO_RANK

    @property
    def source(self) -> str:
        """Where it comes from, for people."""
        return "a backup" if self.is_from_backup else f"rank {self.source_rank} slot {self.source_slot}"

    @property
    def is_relay(self) -> bool:
        """Whether its bytes come from staging, not from a live slot."""
        return self.relay_of != NOT_RELAYED


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """How fast a rank may send experts. bytes_per_s: most that it sends; 0 = no limit. time_share: of its time, 1 = no limit.

    >>> Throttle(bytes_per_s=2e9, time_share=0.5).seconds(4_000_000_000, unthrottled_s=3.0)
    8.0
    """

    bytes_per_s: float = 0.0
    time_share: float = 1.0

    def seconds(self, num_bytes: int, *, unthrottled_s: float) -> float:
        """Longest time that so many bytes may take, where they take no more than `unthrottled_s` at full speed.

        A rank that sends is either held back by the rate or rests for its share: both together are the most.
        """
        paced_s = num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return paced_s + unthrottled_s / self.time_share


NO_THROTTLE = Throttle()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Copy these weights aside. Every rank gets the same layers and copies, so both ends of a copy follow one plan.

    mesh_id: id of the first chunk that used the present transfer connections; a new one tells all ranks to connect anew
    (after a chunk that failed or was withdrawn, bytes of it may still be under way).
    stage_timeout_s, arm_ttl_s: durations on the receiver's monotonic clock; the throttle is allowed for in the first.
    """

    to: Address
    chunk_id: ChunkId
    generation: GenerationNumber
    weights_version: int
    mesh_id: ChunkId
    layers: tuple[LayerChange, ...]
    copies: tuple[Copy, ...]
    stage_timeout_s: float
    arm_ttl_s: float
    throttle: Throttle = NO_THROTTLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Every rank has staged this chunk: vote for it from the next vote on."""

    to: Address
    chunk_id: ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Disarm:
    """Withdraw a chunk (also one never seen). epoch: of the planner that asks."""

    to: Address
    chunk_id: ChunkId
    epoch: Epoch


ToRank = Hello | Stage | Arm | Disarm


# ── rank → planner ───────────────────────────────────────────────────────────────────────────────────────────────────────


class RefusalCode(StrEnum):
    """Why a rank does not take part in a chunk."""

    BUSY = "busy"  # another chunk is open
    CLOSED = "closed"  # the id is at or below the tombstone
    STALE_EPOCH = "stale_epoch"
    OLD_DIGEST = "old_digest"  # the live row is not the one that the plan starts from
    NEW_DIGEST = "new_digest"  # the row does not have the digest that the message claims
    WEIGHTS_VERSION = "weights_version"
    MANIFEST = "manifest"
    BUDGET = "budget"  # more bytes than staging holds
    INVALID = "invalid"  # malformed: unknown layer, slot out of range, source slot that holds another expert, …
    TRANSFER = "transfer"  # a copy failed or timed out
    CHECKSUM = "checksum"
    EXPIRED = "expired"  # not armed in time
    OFF = "off"  # observe only: no staging, voting off, or switched off locally
    WITHDRAWN = "withdrawn"  # closed by a Disarm or a new leader while staging


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes that arrived at this rank, by kind of link."""

    same_rank: int = 0
    same_node: int = 0
    cross_node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLayer:
    """What a layer routes by now. generation 0 = as loaded. row: length P; shares: length P under weighted dispatch."""

    layer: LayerRef
    generation: GenerationNumber
    digest: int
    row: tuple[int, ...]
    shares: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Answer to Hello: sent once no chunk of an older epoch is open.

    epoch: the one answered. epoch_seen, generation_seen: highest that this rank ever saw.
    closed_id: tombstone. flipped_id: last chunk that it flipped. boundary: step boundaries passed.
    voting: takes part in votes; off_reason says why not (empty when it does).
    """

    sender: Address
    epoch: Epoch
    epoch_seen: Epoch
    generation_seen: GenerationNumber
    closed_id: ChunkId
    flipped_id: ChunkId
    boundary: int
    weights_version: int
    voting: bool
    off_reason: str
    layers: tuple[LiveLayer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """All copies of the chunk that end here are in staging and their checksums are right."""

    sender: Address
    chunk_id: ChunkId
    seconds: float
    received: LinkBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """This rank will not flip the chunk, and has closed its id (BUSY and stale ones excepted: those change nothing)."""

    sender: Address
    chunk_id: ChunkId
    code: RefusalCode
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Armed:
    """From the next vote on this rank casts the chunk's id."""

    sender: Address
    chunk_id: ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The vote passed while the engine runs no steps; the flip comes before its next step."""

    sender: Address
    chunk_id: ChunkId
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flipped:
    """The chunk is live here. digests: of its layers.

    boundary: the step boundary of the flip, the same on every rank; 0 = before any step, as the group formed again.
    """

    sender: Address
    chunk_id: ChunkId
    boundary: int
    digests: tuple[tuple[LayerRef, int], ...]
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disarmed:
    """The chunk's id is closed here and it did not flip: so it never flips in this group."""

    sender: Address
    chunk_id: ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Sign of life, about once a second, and at once when `voting` changes.

    idle: the engine runs no steps now (a state, not a fault). windows_dropped: load windows lost in the ring so far.
    """

    sender: Address
    boundary: int
    idle: bool
    voting: bool
    off_reason: str
    windows_dropped: int
    weights_version: int


FromRank = Live | Staged | Refused | Armed | Committed | Flipped | Disarmed | Pulse
