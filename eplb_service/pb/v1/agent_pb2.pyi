from eplb_service.pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReportSemantics(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_SEMANTICS_UNSPECIFIED: _ClassVar[ReportSemantics]
    REPORT_SEMANTICS_LOCAL_TOKENS: _ClassVar[ReportSemantics]
    REPORT_SEMANTICS_GLOBAL_TOKENS: _ClassVar[ReportSemantics]

class CountBasis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COUNT_BASIS_LOGICAL: _ClassVar[CountBasis]
    COUNT_BASIS_CONVERTED_AT_END: _ClassVar[CountBasis]
REPORT_SEMANTICS_UNSPECIFIED: ReportSemantics
REPORT_SEMANTICS_LOCAL_TOKENS: ReportSemantics
REPORT_SEMANTICS_GLOBAL_TOKENS: ReportSemantics
COUNT_BASIS_LOGICAL: CountBasis
COUNT_BASIS_CONVERTED_AT_END: CountBasis

class LayerInfo(_message.Message):
    __slots__ = ("layer_id", "num_logical", "slots", "expert_bytes")
    LAYER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer_id: int
    num_logical: int
    slots: int
    expert_bytes: int
    def __init__(self, layer_id: _Optional[int] = ..., num_logical: _Optional[int] = ..., slots: _Optional[int] = ..., expert_bytes: _Optional[int] = ...) -> None: ...

class LayerTensors(_message.Message):
    __slots__ = ("layer_ids", "tensors")
    class Tensor(_message.Message):
        __slots__ = ("name", "description")
        NAME_FIELD_NUMBER: _ClassVar[int]
        DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
        name: str
        description: str
        def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedCompositeFieldContainer[LayerTensors.Tensor]
    def __init__(self, layer_ids: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[_Union[LayerTensors.Tensor, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "digest", "manifest_digest", "layers", "tensors")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    manifest_digest: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerInfo]
    tensors: _containers.RepeatedCompositeFieldContainer[LayerTensors]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., manifest_digest: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerInfo, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[LayerTensors, _Mapping]]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "capabilities", "deployment", "phase", "stage", "models", "address", "node", "group_rank_ids", "capacity", "vote_period", "window_steps", "sub_windows", "staging_bytes", "replica_table_width", "weights_version", "dispatch", "nic")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    VOTE_PERIOD_FIELD_NUMBER: _ClassVar[int]
    WINDOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    SUB_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_TABLE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    NIC_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    deployment: str
    phase: _common_pb2.Phase
    stage: int
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    address: _common_pb2.Address
    node: str
    group_rank_ids: _containers.RepeatedScalarFieldContainer[int]
    capacity: float
    vote_period: int
    window_steps: int
    sub_windows: int
    staging_bytes: int
    replica_table_width: int
    weights_version: int
    dispatch: str
    nic: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., deployment: _Optional[str] = ..., phase: _Optional[_Union[_common_pb2.Phase, str]] = ..., stage: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ..., address: _Optional[_Union[_common_pb2.Address, _Mapping]] = ..., node: _Optional[str] = ..., group_rank_ids: _Optional[_Iterable[int]] = ..., capacity: _Optional[float] = ..., vote_period: _Optional[int] = ..., window_steps: _Optional[int] = ..., sub_windows: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., replica_table_width: _Optional[int] = ..., weights_version: _Optional[int] = ..., dispatch: _Optional[str] = ..., nic: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("protocol", "planner")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    planner: str
    def __init__(self, protocol: _Optional[int] = ..., planner: _Optional[str] = ...) -> None: ...

class TableCounts(_message.Message):
    __slots__ = ("model", "layer_ids", "counts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _common_pb2.Array
    def __init__(self, model: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Union[_common_pb2.Array, _Mapping]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("deployment", "address", "window_index", "boundary_begin", "boundary_end", "forward_passes", "tokens", "semantics", "phase", "warmup", "live_digest_begin", "live_digest_end", "step_time_min_s", "step_time_mean_s", "step_time_max_s", "tables", "basis")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_INDEX_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_BEGIN_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_END_FIELD_NUMBER: _ClassVar[int]
    FORWARD_PASSES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEMANTICS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    LIVE_DIGEST_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LIVE_DIGEST_END_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MIN_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MEAN_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MAX_S_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    address: _common_pb2.Address
    window_index: int
    boundary_begin: int
    boundary_end: int
    forward_passes: int
    tokens: int
    semantics: ReportSemantics
    phase: _common_pb2.Phase
    warmup: bool
    live_digest_begin: int
    live_digest_end: int
    step_time_min_s: float
    step_time_mean_s: float
    step_time_max_s: float
    tables: _containers.RepeatedCompositeFieldContainer[TableCounts]
    basis: CountBasis
    def __init__(self, deployment: _Optional[str] = ..., address: _Optional[_Union[_common_pb2.Address, _Mapping]] = ..., window_index: _Optional[int] = ..., boundary_begin: _Optional[int] = ..., boundary_end: _Optional[int] = ..., forward_passes: _Optional[int] = ..., tokens: _Optional[int] = ..., semantics: _Optional[_Union[ReportSemantics, str]] = ..., phase: _Optional[_Union[_common_pb2.Phase, str]] = ..., warmup: bool = ..., live_digest_begin: _Optional[int] = ..., live_digest_end: _Optional[int] = ..., step_time_min_s: _Optional[float] = ..., step_time_mean_s: _Optional[float] = ..., step_time_max_s: _Optional[float] = ..., tables: _Optional[_Iterable[_Union[TableCounts, _Mapping]]] = ..., basis: _Optional[_Union[CountBasis, str]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("address", "window_index", "accepted", "code", "reason")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_INDEX_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    address: _common_pb2.Address
    window_index: int
    accepted: bool
    code: str
    reason: str
    def __init__(self, address: _Optional[_Union[_common_pb2.Address, _Mapping]] = ..., window_index: _Optional[int] = ..., accepted: bool = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("deployment", "ranks")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    ranks: _containers.RepeatedCompositeFieldContainer[_common_pb2.Address]
    def __init__(self, deployment: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[_common_pb2.Address, _Mapping]]] = ...) -> None: ...

class LiveLayer(_message.Message):
    __slots__ = ("layer", "generation", "digest", "row", "shares")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    layer: _common_pb2.Layer
    generation: int
    digest: int
    row: _common_pb2.Array
    shares: _common_pb2.Array
    def __init__(self, layer: _Optional[_Union[_common_pb2.Layer, _Mapping]] = ..., generation: _Optional[int] = ..., digest: _Optional[int] = ..., row: _Optional[_Union[_common_pb2.Array, _Mapping]] = ..., shares: _Optional[_Union[_common_pb2.Array, _Mapping]] = ...) -> None: ...

class Live(_message.Message):
    __slots__ = ("epoch", "epoch_seen", "generation_seen", "closed_id", "flipped_id", "boundary", "weights_version", "voting", "off_reason", "layers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SEEN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_ID_FIELD_NUMBER: _ClassVar[int]
    FLIPPED_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOTING_FIELD_NUMBER: _ClassVar[int]
    OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    epoch_seen: int
    generation_seen: int
    closed_id: int
    flipped_id: int
    boundary: int
    weights_version: int
    voting: bool
    off_reason: str
    layers: _containers.RepeatedCompositeFieldContainer[LiveLayer]
    def __init__(self, epoch: _Optional[int] = ..., epoch_seen: _Optional[int] = ..., generation_seen: _Optional[int] = ..., closed_id: _Optional[int] = ..., flipped_id: _Optional[int] = ..., boundary: _Optional[int] = ..., weights_version: _Optional[int] = ..., voting: bool = ..., off_reason: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LiveLayer, _Mapping]]] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("chunk_id", "seconds", "received")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    seconds: float
    received: _common_pb2.LinkBytes
    def __init__(self, chunk_id: _Optional[int] = ..., seconds: _Optional[float] = ..., received: _Optional[_Union[_common_pb2.LinkBytes, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("chunk_id", "code", "reason")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    code: str
    reason: str
    def __init__(self, chunk_id: _Optional[int] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Armed(_message.Message):
    __slots__ = ("chunk_id",)
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    def __init__(self, chunk_id: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("chunk_id", "boundary")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    boundary: int
    def __init__(self, chunk_id: _Optional[int] = ..., boundary: _Optional[int] = ...) -> None: ...

class Flipped(_message.Message):
    __slots__ = ("chunk_id", "boundary", "digests", "stall_s")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    boundary: int
    digests: _containers.RepeatedCompositeFieldContainer[RowDigest]
    stall_s: float
    def __init__(self, chunk_id: _Optional[int] = ..., boundary: _Optional[int] = ..., digests: _Optional[_Iterable[_Union[RowDigest, _Mapping]]] = ..., stall_s: _Optional[float] = ...) -> None: ...

class RowDigest(_message.Message):
    __slots__ = ("layer", "digest")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    layer: _common_pb2.Layer
    digest: int
    def __init__(self, layer: _Optional[_Union[_common_pb2.Layer, _Mapping]] = ..., digest: _Optional[int] = ...) -> None: ...

class Disarmed(_message.Message):
    __slots__ = ("chunk_id",)
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    def __init__(self, chunk_id: _Optional[int] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("boundary", "idle", "voting", "off_reason", "windows_dropped", "weights_version")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    VOTING_FIELD_NUMBER: _ClassVar[int]
    OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    idle: bool
    voting: bool
    off_reason: str
    windows_dropped: int
    weights_version: int
    def __init__(self, boundary: _Optional[int] = ..., idle: bool = ..., voting: bool = ..., off_reason: _Optional[str] = ..., windows_dropped: _Optional[int] = ..., weights_version: _Optional[int] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ControlFromAgent(_message.Message):
    __slots__ = ("address", "attach", "live", "staged", "refused", "armed", "committed", "flipped", "disarmed", "pulse", "gone")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ARMED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FLIPPED_FIELD_NUMBER: _ClassVar[int]
    DISARMED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    address: _common_pb2.Address
    attach: Attach
    live: Live
    staged: Staged
    refused: Refused
    armed: Armed
    committed: Committed
    flipped: Flipped
    disarmed: Disarmed
    pulse: Pulse
    gone: Gone
    def __init__(self, address: _Optional[_Union[_common_pb2.Address, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., live: _Optional[_Union[Live, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., armed: _Optional[_Union[Armed, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., flipped: _Optional[_Union[Flipped, _Mapping]] = ..., disarmed: _Optional[_Union[Disarmed, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class LayerChange(_message.Message):
    __slots__ = ("layer", "old_digest", "new_digest", "new_row", "new_shares")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OLD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEW_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NEW_ROW_FIELD_NUMBER: _ClassVar[int]
    NEW_SHARES_FIELD_NUMBER: _ClassVar[int]
    layer: _common_pb2.Layer
    old_digest: int
    new_digest: int
    new_row: _common_pb2.Array
    new_shares: _common_pb2.Array
    def __init__(self, layer: _Optional[_Union[_common_pb2.Layer, _Mapping]] = ..., old_digest: _Optional[int] = ..., new_digest: _Optional[int] = ..., new_row: _Optional[_Union[_common_pb2.Array, _Mapping]] = ..., new_shares: _Optional[_Union[_common_pb2.Array, _Mapping]] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("layer", "expert", "source_rank", "source_slot", "target_rank", "target_slot", "relay_of", "from_backup")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SLOT_FIELD_NUMBER: _ClassVar[int]
    TARGET_RANK_FIELD_NUMBER: _ClassVar[int]
    TARGET_SLOT_FIELD_NUMBER: _ClassVar[int]
    RELAY_OF_FIELD_NUMBER: _ClassVar[int]
    FROM_BACKUP_FIELD_NUMBER: _ClassVar[int]
    layer: _common_pb2.Layer
    expert: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int
    relay_of: int
    from_backup: bool
    def __init__(self, layer: _Optional[_Union[_common_pb2.Layer, _Mapping]] = ..., expert: _Optional[int] = ..., source_rank: _Optional[int] = ..., source_slot: _Optional[int] = ..., target_rank: _Optional[int] = ..., target_slot: _Optional[int] = ..., relay_of: _Optional[int] = ..., from_backup: bool = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("chunk_id", "generation", "weights_version", "mesh_id", "layers", "copies", "stage_timeout_s", "arm_ttl_s", "bytes_per_s", "time_share")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    MESH_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ARM_TTL_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIME_SHARE_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    generation: int
    weights_version: int
    mesh_id: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerChange]
    copies: _containers.RepeatedCompositeFieldContainer[Copy]
    stage_timeout_s: float
    arm_ttl_s: float
    bytes_per_s: float
    time_share: float
    def __init__(self, chunk_id: _Optional[int] = ..., generation: _Optional[int] = ..., weights_version: _Optional[int] = ..., mesh_id: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerChange, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[Copy, _Mapping]]] = ..., stage_timeout_s: _Optional[float] = ..., arm_ttl_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., time_share: _Optional[float] = ...) -> None: ...

class Arm(_message.Message):
    __slots__ = ("chunk_id",)
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    def __init__(self, chunk_id: _Optional[int] = ...) -> None: ...

class Disarm(_message.Message):
    __slots__ = ("chunk_id", "epoch")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    epoch: int
    def __init__(self, chunk_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ControlToAgent(_message.Message):
    __slots__ = ("address", "hello", "stage", "arm", "disarm")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    DISARM_FIELD_NUMBER: _ClassVar[int]
    address: _common_pb2.Address
    hello: Hello
    stage: Stage
    arm: Arm
    disarm: Disarm
    def __init__(self, address: _Optional[_Union[_common_pb2.Address, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., arm: _Optional[_Union[Arm, _Mapping]] = ..., disarm: _Optional[_Union[Disarm, _Mapping]] = ...) -> None: ...
