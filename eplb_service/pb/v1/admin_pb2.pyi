from eplb_service.pb.v1 import common_pb2 as _common_pb2
from eplb_service.pb.v1 import placement_pb2 as _placement_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    def __init__(self, deployment: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("address", "node", "state", "voting", "off_reason", "boundary", "idle", "staging_bytes", "windows_dropped", "last_seen_s_ago", "chunk_state", "nic")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VOTING_FIELD_NUMBER: _ClassVar[int]
    OFF_REASON_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_S_AGO_FIELD_NUMBER: _ClassVar[int]
    CHUNK_STATE_FIELD_NUMBER: _ClassVar[int]
    NIC_FIELD_NUMBER: _ClassVar[int]
    address: _common_pb2.Address
    node: str
    state: str
    voting: bool
    off_reason: str
    boundary: int
    idle: bool
    staging_bytes: int
    windows_dropped: int
    last_seen_s_ago: float
    chunk_state: str
    nic: str
    def __init__(self, address: _Optional[_Union[_common_pb2.Address, _Mapping]] = ..., node: _Optional[str] = ..., state: _Optional[str] = ..., voting: bool = ..., off_reason: _Optional[str] = ..., boundary: _Optional[int] = ..., idle: bool = ..., staging_bytes: _Optional[int] = ..., windows_dropped: _Optional[int] = ..., last_seen_s_ago: _Optional[float] = ..., chunk_state: _Optional[str] = ..., nic: _Optional[str] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("generation", "state", "chunks_done", "chunks_total", "chunk_id", "age_s", "stalled", "last_error", "waiting_for")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_DONE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    generation: int
    state: str
    chunks_done: int
    chunks_total: int
    chunk_id: int
    age_s: float
    stalled: bool
    last_error: str
    waiting_for: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., state: _Optional[str] = ..., chunks_done: _Optional[int] = ..., chunks_total: _Optional[int] = ..., chunk_id: _Optional[int] = ..., age_s: _Optional[float] = ..., stalled: bool = ..., last_error: _Optional[str] = ..., waiting_for: _Optional[_Iterable[int]] = ...) -> None: ...

class SettingsView(_message.Message):
    __slots__ = ("deployment", "mode", "paused", "pause_reason", "policy", "drained_rank_ids")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAINED_RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    mode: str
    paused: bool
    pause_reason: str
    policy: str
    drained_rank_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, deployment: _Optional[str] = ..., mode: _Optional[str] = ..., paused: bool = ..., pause_reason: _Optional[str] = ..., policy: _Optional[str] = ..., drained_rank_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class UnreachableView(_message.Message):
    __slots__ = ("layer", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: _common_pb2.Layer
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[_Union[_common_pb2.Layer, _Mapping]] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainView(_message.Message):
    __slots__ = ("rank_id", "state", "experts_held", "experts_alone", "reason")
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_HELD_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_ALONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank_id: int
    state: str
    experts_held: int
    experts_alone: int
    reason: str
    def __init__(self, rank_id: _Optional[int] = ..., state: _Optional[str] = ..., experts_held: _Optional[int] = ..., experts_alone: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class VerdictView(_message.Message):
    __slots__ = ("move", "code", "reason", "decided_at_s", "numbers")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MOVE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_S_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    move: bool
    code: str
    reason: str
    decided_at_s: float
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, move: bool = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., decided_at_s: _Optional[float] = ..., numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LearnedView(_message.Message):
    __slots__ = ("step_time", "moves", "horizon", "promises", "hold", "numbers", "forecast")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    PROMISES_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    step_time: str
    moves: str
    horizon: str
    promises: str
    hold: str
    numbers: _containers.ScalarMap[str, float]
    forecast: str
    def __init__(self, step_time: _Optional[str] = ..., moves: _Optional[str] = ..., horizon: _Optional[str] = ..., promises: _Optional[str] = ..., hold: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., forecast: _Optional[str] = ...) -> None: ...

class AdvisedView(_message.Message):
    __slots__ = ("engine", "last_question_s_ago", "interval_s", "answers", "told_generation", "last_reason")
    class AnswersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LAST_QUESTION_S_AGO_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    TOLD_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    engine: str
    last_question_s_ago: float
    interval_s: float
    answers: _containers.ScalarMap[str, int]
    told_generation: int
    last_reason: str
    def __init__(self, engine: _Optional[str] = ..., last_question_s_ago: _Optional[float] = ..., interval_s: _Optional[float] = ..., answers: _Optional[_Mapping[str, int]] = ..., told_generation: _Optional[int] = ..., last_reason: _Optional[str] = ...) -> None: ...

class DeploymentStatus(_message.Message):
    __slots__ = ("deployment", "state", "reason", "phase", "settings", "epoch", "ranks", "rollout", "last_verdict", "live_generation", "imbalance", "window_coverage", "window_index", "windows_accepted", "windows_refused", "window_tokens", "layers", "rank_loads", "learned", "advised", "drains", "unreachable", "restoring")
    class WindowsRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    LAST_VERDICT_FIELD_NUMBER: _ClassVar[int]
    LIVE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_INDEX_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RANK_LOADS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    RESTORING_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    state: str
    reason: str
    phase: _common_pb2.Phase
    settings: SettingsView
    epoch: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    rollout: RolloutStatus
    last_verdict: VerdictView
    live_generation: int
    imbalance: _common_pb2.Imbalance
    window_coverage: float
    window_index: int
    windows_accepted: int
    windows_refused: _containers.ScalarMap[str, int]
    window_tokens: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Layer]
    rank_loads: _common_pb2.Array
    learned: LearnedView
    advised: AdvisedView
    drains: _containers.RepeatedCompositeFieldContainer[DrainView]
    unreachable: _containers.RepeatedCompositeFieldContainer[UnreachableView]
    restoring: str
    def __init__(self, deployment: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., phase: _Optional[_Union[_common_pb2.Phase, str]] = ..., settings: _Optional[_Union[SettingsView, _Mapping]] = ..., epoch: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., rollout: _Optional[_Union[RolloutStatus, _Mapping]] = ..., last_verdict: _Optional[_Union[VerdictView, _Mapping]] = ..., live_generation: _Optional[int] = ..., imbalance: _Optional[_Union[_common_pb2.Imbalance, _Mapping]] = ..., window_coverage: _Optional[float] = ..., window_index: _Optional[int] = ..., windows_accepted: _Optional[int] = ..., windows_refused: _Optional[_Mapping[str, int]] = ..., window_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Layer, _Mapping]]] = ..., rank_loads: _Optional[_Union[_common_pb2.Array, _Mapping]] = ..., learned: _Optional[_Union[LearnedView, _Mapping]] = ..., advised: _Optional[_Union[AdvisedView, _Mapping]] = ..., drains: _Optional[_Iterable[_Union[DrainView, _Mapping]]] = ..., unreachable: _Optional[_Iterable[_Union[UnreachableView, _Mapping]]] = ..., restoring: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("planner", "version", "store", "store_ok", "deployments", "uptime_s", "configuration")
    class ConfigurationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_OK_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    planner: str
    version: str
    store: str
    store_ok: bool
    deployments: _containers.RepeatedCompositeFieldContainer[DeploymentStatus]
    uptime_s: float
    configuration: _containers.ScalarMap[str, str]
    def __init__(self, planner: _Optional[str] = ..., version: _Optional[str] = ..., store: _Optional[str] = ..., store_ok: bool = ..., deployments: _Optional[_Iterable[_Union[DeploymentStatus, _Mapping]]] = ..., uptime_s: _Optional[float] = ..., configuration: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("deployment", "policy")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    policy: str
    def __init__(self, deployment: _Optional[str] = ..., policy: _Optional[str] = ...) -> None: ...

class FrontPointView(_message.Message):
    __slots__ = ("model", "predicted", "moves", "is_choice", "is_own")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    IS_CHOICE_FIELD_NUMBER: _ClassVar[int]
    IS_OWN_FIELD_NUMBER: _ClassVar[int]
    model: str
    predicted: _common_pb2.Imbalance
    moves: _common_pb2.MoveSummary
    is_choice: bool
    is_own: bool
    def __init__(self, model: _Optional[str] = ..., predicted: _Optional[_Union[_common_pb2.Imbalance, _Mapping]] = ..., moves: _Optional[_Union[_common_pb2.MoveSummary, _Mapping]] = ..., is_choice: bool = ..., is_own: bool = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("proposal", "verdict", "solve_s", "front", "moves_lower_bound", "cut_off", "cannot_roll_out")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SOLVE_S_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    MOVES_LOWER_BOUND_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    CANNOT_ROLL_OUT_FIELD_NUMBER: _ClassVar[int]
    proposal: _placement_pb2.GenerationView
    verdict: VerdictView
    solve_s: float
    front: _containers.RepeatedCompositeFieldContainer[FrontPointView]
    moves_lower_bound: int
    cut_off: bool
    cannot_roll_out: str
    def __init__(self, proposal: _Optional[_Union[_placement_pb2.GenerationView, _Mapping]] = ..., verdict: _Optional[_Union[VerdictView, _Mapping]] = ..., solve_s: _Optional[float] = ..., front: _Optional[_Iterable[_Union[FrontPointView, _Mapping]]] = ..., moves_lower_bound: _Optional[int] = ..., cut_off: bool = ..., cannot_roll_out: _Optional[str] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("deployment", "idempotency_key", "force", "policy")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    idempotency_key: str
    force: bool
    policy: str
    def __init__(self, deployment: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., force: bool = ..., policy: _Optional[str] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("generation", "verdict")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    verdict: VerdictView
    def __init__(self, generation: _Optional[int] = ..., verdict: _Optional[_Union[VerdictView, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("deployment", "generation", "idempotency_key")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    generation: int
    idempotency_key: str
    def __init__(self, deployment: _Optional[str] = ..., generation: _Optional[int] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deployment", "rank_ids", "node", "idempotency_key")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    rank_ids: _containers.RepeatedScalarFieldContainer[int]
    node: str
    idempotency_key: str
    def __init__(self, deployment: _Optional[str] = ..., rank_ids: _Optional[_Iterable[int]] = ..., node: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("generation", "verdict", "drains", "rank_ids")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    verdict: VerdictView
    drains: _containers.RepeatedCompositeFieldContainer[DrainView]
    rank_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generation: _Optional[int] = ..., verdict: _Optional[_Union[VerdictView, _Mapping]] = ..., drains: _Optional[_Iterable[_Union[DrainView, _Mapping]]] = ..., rank_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("deployment", "rank_ids", "node")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    rank_ids: _containers.RepeatedScalarFieldContainer[int]
    node: str
    def __init__(self, deployment: _Optional[str] = ..., rank_ids: _Optional[_Iterable[int]] = ..., node: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("deployment", "reason")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    reason: str
    def __init__(self, deployment: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("deployment",)
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    def __init__(self, deployment: _Optional[str] = ...) -> None: ...

class SetModeRequest(_message.Message):
    __slots__ = ("deployment", "mode")
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    deployment: str
    mode: str
    def __init__(self, deployment: _Optional[str] = ..., mode: _Optional[str] = ...) -> None: ...
