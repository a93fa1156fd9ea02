from eplb_service.pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AdviseRequest(_message.Message):
    __slots__ = ("deployment", "engine", "origin", "sequence", "model", "layer_ids", "rank_ids", "nodes", "num_logical", "dispatch", "num_groups", "load", "current", "digest", "expert_bytes", "steps", "step_time_s", "timeout_s", "copied_generation", "copied_s", "copy_held_steps")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    COPIED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    COPIED_S_FIELD_NUMBER: _ClassVar[int]
    COPY_HELD_STEPS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    engine: str
    origin: int
    sequence: int
    model: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    rank_ids: _containers.RepeatedScalarFieldContainer[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    num_logical: int
    dispatch: str
    num_groups: int
    load: _common_pb2.Array
    current: _common_pb2.Array
    digest: int
    expert_bytes: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    step_time_s: float
    timeout_s: float
    copied_generation: int
    copied_s: float
    copy_held_steps: bool
    def __init__(self, deployment: _Optional[str] = ..., engine: _Optional[str] = ..., origin: _Optional[int] = ..., sequence: _Optional[int] = ..., model: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., rank_ids: _Optional[_Iterable[int]] = ..., nodes: _Optional[_Iterable[str]] = ..., num_logical: _Optional[int] = ..., dispatch: _Optional[str] = ..., num_groups: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.Array, _Mapping]] = ..., current: _Optional[_Union[_common_pb2.Array, _Mapping]] = ..., digest: _Optional[int] = ..., expert_bytes: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ..., step_time_s: _Optional[float] = ..., timeout_s: _Optional[float] = ..., copied_generation: _Optional[int] = ..., copied_s: _Optional[float] = ..., copy_held_steps: bool = ...) -> None: ...

class AdviseReply(_message.Message):
    __slots__ = ("origin", "sequence", "move", "generation", "digest", "reason", "rows")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    origin: int
    sequence: int
    move: bool
    generation: int
    digest: int
    reason: str
    rows: _common_pb2.Array
    def __init__(self, origin: _Optional[int] = ..., sequence: _Optional[int] = ..., move: bool = ..., generation: _Optional[int] = ..., digest: _Optional[int] = ..., reason: _Optional[str] = ..., rows: _Optional[_Union[_common_pb2.Array, _Mapping]] = ...) -> None: ...
