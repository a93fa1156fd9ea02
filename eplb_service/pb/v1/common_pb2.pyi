from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_MIXED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_MIXED: Phase

class Array(_message.Message):
    __slots__ = ("shape", "dtype", "data")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    data: bytes
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Address(_message.Message):
    __slots__ = ("rank_id", "incarnation", "group_id")
    RANK_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    rank_id: int
    incarnation: int
    group_id: int
    def __init__(self, rank_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., group_id: _Optional[int] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("model", "layer_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    layer_id: int
    def __init__(self, model: _Optional[str] = ..., layer_id: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("model", "layer_ids", "num_logical", "rank_ids", "physical_to_logical", "shares")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    RANK_IDS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_TO_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    model: str
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logical: int
    rank_ids: _containers.RepeatedScalarFieldContainer[int]
    physical_to_logical: Array
    shares: Array
    def __init__(self, model: _Optional[str] = ..., layer_ids: _Optional[_Iterable[int]] = ..., num_logical: _Optional[int] = ..., rank_ids: _Optional[_Iterable[int]] = ..., physical_to_logical: _Optional[_Union[Array, _Mapping]] = ..., shares: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("tables", "digest")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    digest: str
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class Imbalance(_message.Message):
    __slots__ = ("mean_over_layers", "worst_layer", "per_layer")
    MEAN_OVER_LAYERS_FIELD_NUMBER: _ClassVar[int]
    WORST_LAYER_FIELD_NUMBER: _ClassVar[int]
    PER_LAYER_FIELD_NUMBER: _ClassVar[int]
    mean_over_layers: float
    worst_layer: float
    per_layer: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, mean_over_layers: _Optional[float] = ..., worst_layer: _Optional[float] = ..., per_layer: _Optional[_Iterable[float]] = ...) -> None: ...

class MoveSummary(_message.Message):
    __slots__ = ("experts", "slots_rewritten", "bytes", "bytes_from_backups")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_REWRITTEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FROM_BACKUPS_FIELD_NUMBER: _ClassVar[int]
    experts: int
    slots_rewritten: int
    bytes: LinkBytes
    bytes_from_backups: int
    def __init__(self, experts: _Optional[int] = ..., slots_rewritten: _Optional[int] = ..., bytes: _Optional[_Union[LinkBytes, _Mapping]] = ..., bytes_from_backups: _Optional[int] = ...) -> None: ...

class LinkBytes(_message.Message):
    __slots__ = ("same_rank", "same_node", "cross_node")
    SAME_RANK_FIELD_NUMBER: _ClassVar[int]
    SAME_NODE_FIELD_NUMBER: _ClassVar[int]
    CROSS_NODE_FIELD_NUMBER: _ClassVar[int]
    same_rank: int
    same_node: int
    cross_node: int
    def __init__(self, same_rank: _Optional[int] = ..., same_node: _Optional[int] = ..., cross_node: _Optional[int] = ...) -> None: ...
