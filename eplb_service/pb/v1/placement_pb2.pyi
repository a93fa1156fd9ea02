from eplb_service.pb.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATION_STATE_UNSPECIFIED: _ClassVar[GenerationState]
    GENERATION_STATE_PUBLISHED: _ClassVar[GenerationState]
    GENERATION_STATE_ROLLING_OUT: _ClassVar[GenerationState]
    GENERATION_STATE_ACTIVE: _ClassVar[GenerationState]
    GENERATION_STATE_STOPPED: _ClassVar[GenerationState]
    GENERATION_STATE_SUPERSEDED: _ClassVar[GenerationState]
GENERATION_STATE_UNSPECIFIED: GenerationState
GENERATION_STATE_PUBLISHED: GenerationState
GENERATION_STATE_ROLLING_OUT: GenerationState
GENERATION_STATE_ACTIVE: GenerationState
GENERATION_STATE_STOPPED: GenerationState
GENERATION_STATE_SUPERSEDED: GenerationState

class GetPlacementRequest(_message.Message):
    __slots__ = ("deployment", "generation")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    generation: int
    def __init__(self, deployment: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class WatchPlacementRequest(_message.Message):
    __slots__ = ("deployment", "known_digest")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    known_digest: str
    def __init__(self, deployment: _Optional[str] = ..., known_digest: _Optional[str] = ...) -> None: ...

class ListGenerationsRequest(_message.Message):
    __slots__ = ("deployment", "limit")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    limit: int
    def __init__(self, deployment: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListGenerationsResponse(_message.Message):
    __slots__ = ("generations",)
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    generations: _containers.RepeatedCompositeFieldContainer[GenerationView]
    def __init__(self, generations: _Optional[_Iterable[_Union[GenerationView, _Mapping]]] = ...) -> None: ...

class ObservedWindow(_message.Message):
    __slots__ = ("window_index", "mean", "worst_layer", "previous_mean", "previous_worst_layer", "step_s", "expected_step_s", "previous_step_s")
    WINDOW_INDEX_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    WORST_LAYER_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MEAN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_WORST_LAYER_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_STEP_S_FIELD_NUMBER: _ClassVar[int]
    window_index: int
    mean: float
    worst_layer: float
    previous_mean: float
    previous_worst_layer: float
    step_s: float
    expected_step_s: float
    previous_step_s: float
    def __init__(self, window_index: _Optional[int] = ..., mean: _Optional[float] = ..., worst_layer: _Optional[float] = ..., previous_mean: _Optional[float] = ..., previous_worst_layer: _Optional[float] = ..., step_s: _Optional[float] = ..., expected_step_s: _Optional[float] = ..., previous_step_s: _Optional[float] = ...) -> None: ...

class FlipStall(_message.Message):
    __slots__ = ("expected_s", "limit_s", "measured_s")
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_S_FIELD_NUMBER: _ClassVar[int]
    expected_s: float
    limit_s: float
    measured_s: float
    def __init__(self, expected_s: _Optional[float] = ..., limit_s: _Optional[float] = ..., measured_s: _Optional[float] = ...) -> None: ...

class GenerationView(_message.Message):
    __slots__ = ("deployment", "generation", "placement", "state", "reason", "stop_reason", "policy", "created_at_s", "active_at_s", "before", "predicted", "lower_bound", "observed", "moves", "layer_generations", "flip_boundaries", "rollout_s", "epoch", "placement_digest", "promised_gain", "observed_windows", "outcome", "judgement", "copied_s", "copy_held_steps", "flip_stall")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_AT_S_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    LOWER_BOUND_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LAYER_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FLIP_BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMISED_GAIN_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    JUDGEMENT_FIELD_NUMBER: _ClassVar[int]
    COPIED_S_FIELD_NUMBER: _ClassVar[int]
    COPY_HELD_STEPS_FIELD_NUMBER: _ClassVar[int]
    FLIP_STALL_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    generation: int
    placement: _common_pb2.Placement
    state: GenerationState
    reason: str
    stop_reason: str
    policy: str
    created_at_s: float
    active_at_s: float
    before: _common_pb2.Imbalance
    predicted: _common_pb2.Imbalance
    lower_bound: _common_pb2.Imbalance
    observed: _common_pb2.Imbalance
    moves: _common_pb2.MoveSummary
    layer_generations: _containers.RepeatedScalarFieldContainer[int]
    flip_boundaries: _containers.RepeatedScalarFieldContainer[int]
    rollout_s: float
    epoch: int
    placement_digest: str
    promised_gain: float
    observed_windows: _containers.RepeatedCompositeFieldContainer[ObservedWindow]
    outcome: str
    judgement: str
    copied_s: float
    copy_held_steps: bool
    flip_stall: FlipStall
    def __init__(self, deployment: _Optional[str] = ..., generation: _Optional[int] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., state: _Optional[_Union[GenerationState, str]] = ..., reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., policy: _Optional[str] = ..., created_at_s: _Optional[float] = ..., active_at_s: _Optional[float] = ..., before: _Optional[_Union[_common_pb2.Imbalance, _Mapping]] = ..., predicted: _Optional[_Union[_common_pb2.Imbalance, _Mapping]] = ..., lower_bound: _Optional[_Union[_common_pb2.Imbalance, _Mapping]] = ..., observed: _Optional[_Union[_common_pb2.Imbalance, _Mapping]] = ..., moves: _Optional[_Union[_common_pb2.MoveSummary, _Mapping]] = ..., layer_generations: _Optional[_Iterable[int]] = ..., flip_boundaries: _Optional[_Iterable[int]] = ..., rollout_s: _Optional[float] = ..., epoch: _Optional[int] = ..., placement_digest: _Optional[str] = ..., promised_gain: _Optional[float] = ..., observed_windows: _Optional[_Iterable[_Union[ObservedWindow, _Mapping]]] = ..., outcome: _Optional[str] = ..., judgement: _Optional[str] = ..., copied_s: _Optional[float] = ..., copy_held_steps: bool = ..., flip_stall: _Optional[_Union[FlipStall, _Mapping]] = ...) -> None: ...

class GetRolloutEventsRequest(_message.Message):
    __slots__ = ("deployment", "generation")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    generation: int
    def __init__(self, deployment: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class RolloutEvent(_message.Message):
    __slots__ = ("at_s", "epoch", "event", "text", "chunk_id", "rank_id")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    epoch: int
    event: str
    text: str
    chunk_id: int
    rank_id: int
    def __init__(self, at_s: _Optional[float] = ..., epoch: _Optional[int] = ..., event: _Optional[str] = ..., text: _Optional[str] = ..., chunk_id: _Optional[int] = ..., rank_id: _Optional[int] = ...) -> None: ...

class RolloutEvents(_message.Message):
    __slots__ = ("deployment", "generation", "events", "dropped", "incomplete")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    generation: int
    events: _containers.RepeatedCompositeFieldContainer[RolloutEvent]
    dropped: int
    incomplete: str
    def __init__(self, deployment: _Optional[str] = ..., generation: _Optional[int] = ..., events: _Optional[_Iterable[_Union[RolloutEvent, _Mapping]]] = ..., dropped: _Optional[int] = ..., incomplete: _Optional[str] = ...) -> None: ...

class DiffPlacementsRequest(_message.Message):
    __slots__ = ("deployment", "from_generation", "to_generation")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    FROM_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TO_GENERATION_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    from_generation: int
    to_generation: int
    def __init__(self, deployment: _Optional[str] = ..., from_generation: _Optional[int] = ..., to_generation: _Optional[int] = ...) -> None: ...

class SlotChange(_message.Message):
    __slots__ = ("layer", "rank_id", "slot", "from_expert", "to_expert", "from_share", "to_share")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FROM_EXPERT_FIELD_NUMBER: _ClassVar[int]
    TO_EXPERT_FIELD_NUMBER: _ClassVar[int]
    FROM_SHARE_FIELD_NUMBER: _ClassVar[int]
    TO_SHARE_FIELD_NUMBER: _ClassVar[int]
    layer: _common_pb2.Layer
    rank_id: int
    slot: int
    from_expert: int
    to_expert: int
    from_share: float
    to_share: float
    def __init__(self, layer: _Optional[_Union[_common_pb2.Layer, _Mapping]] = ..., rank_id: _Optional[int] = ..., slot: _Optional[int] = ..., from_expert: _Optional[int] = ..., to_expert: _Optional[int] = ..., from_share: _Optional[float] = ..., to_share: _Optional[float] = ...) -> None: ...

class DiffPlacementsResponse(_message.Message):
    __slots__ = ("changes", "moves")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SlotChange]
    moves: _common_pb2.MoveSummary
    def __init__(self, changes: _Optional[_Iterable[_Union[SlotChange, _Mapping]]] = ..., moves: _Optional[_Union[_common_pb2.MoveSummary, _Mapping]] = ...) -> None: ...
