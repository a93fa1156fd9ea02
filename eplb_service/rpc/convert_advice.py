"""Questions of engines that move their own weights, and their answers, on the wire. See `convert` for the rules."""

from __future__ import annotations

import numpy as np

from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.dispatch import Dispatch
from eplb_service.errors import InvalidInputError
from eplb_service.ids import GenerationNumber
from eplb_service.pb.v1 import adviser_pb2
from eplb_service.placement import fewest_slots
from eplb_service.policy.magnitudes import EXPERT_BYTES_MAX
from eplb_service.rpc import fields
from eplb_service.rpc.arrays import array_from_pb, array_to_pb
from eplb_service.rpc.fields import EXTENT_MAX, whole

DISPATCHES = tuple(dispatch.value for dispatch in Dispatch if dispatch is not Dispatch.WEIGHTED)
"""Weighted dispatch needs shares, which an answer does not hold."""

LOAD_MAX = 1 << 38
"""Token assignments to one expert between two questions: more than any engine serves, so that sums fit 63 bits."""

TIMEOUT_MAX_S = 600.0


def advice_request_to_pb(value: AdviceRequest) -> adviser_pb2.AdviseRequest:
    """A question. Raises InvalidInputError for one that does not fit the wire."""
    return adviser_pb2.AdviseRequest(
        deployment=fields.deployment_id("deployment", value.deployment),
        engine=fields.name("engine", value.engine),
        origin=whole("origin", value.origin, least=1),
        sequence=whole("sequence", value.sequence, least=1),
        model=fields.name("model", value.model),
        layer_ids=fields.ascending("layer_ids", value.layer_ids),
        rank_ids=[fields.rank_id("rank_ids", rank) for rank in value.rank_ids],
        nodes=[fields.name("nodes", node) for node in value.nodes],
        num_logical=whole("num_logical", value.num_logical, least=1, most=EXTENT_MAX),
        dispatch=fields.name("dispatch", value.dispatch),
        num_groups=whole("num_groups", value.num_groups, least=1, most=EXTENT_MAX),
        load=array_to_pb(value.load, "load"),
        current=array_to_pb(value.current, "current"),
        digest=whole("digest", value.digest, least=1),
        expert_bytes=[whole("expert_bytes", size, most=EXPERT_BYTES_MAX) for size in value.expert_bytes],
        steps=whole("steps", value.steps, most=EXTENT_MAX),
        step_time_s=fields.seconds("step_time_s", value.step_time_s),
        timeout_s=fields.seconds("timeout_s", value.timeout_s, above_zero=True),
        copied_generation=whole("copied_generation", value.copied_generation),
        copied_s=fields.seconds("copied_s", value.copied_s),
        copy_held_steps=value.copy_held_steps,
    )


def advice_request_from_pb(message: adviser_pb2.AdviseRequest) -> AdviceRequest:
    """A question. Raises InvalidInputError for what no engine can ask, naming the field and the numbers."""
    if not message.layer_ids:
        raise InvalidInputError(
            f"layer_ids: model {message.model[:80]!r} comes with 0 MoE layers: nothing to balance; ask for a model with experts"
        )
    whole("layer_ids", len(message.layer_ids), most=fields.LAYERS_MAX)
    whole("rank_ids", len(message.rank_ids), least=1, most=fields.RANK_ID_MAX + 1)
    layer_ids = fields.ascending("layer_ids", message.layer_ids)
    rank_ids = tuple(fields.rank_id("rank_ids", rank) for rank in message.rank_ids)
    if len(set(rank_ids)) != len(rank_ids):
        raise InvalidInputError(f"rank_ids: {list(rank_ids)[:64]} must be unique")
    if len(message.nodes) != len(rank_ids):
        raise InvalidInputError(f"nodes: {len(message.nodes)} names for {len(rank_ids)} ranks; give one for each rank")
    if len(message.expert_bytes) not in (0, len(layer_ids)):
        raise InvalidInputError(
            f"expert_bytes: {len(message.expert_bytes)} sizes for {len(layer_ids)} layers; give one for each layer, or none"
        )
    if message.dispatch not in DISPATCHES:
        raise InvalidInputError(f"dispatch: {message.dispatch[:40]!r}; advised engines pick by {', '.join(DISPATCHES)}")
    num_logical = whole("num_logical", message.num_logical, least=1, most=EXTENT_MAX)
    current = _current(message, len(layer_ids), len(rank_ids), num_logical)
    timeout_s = fields.seconds("timeout_s", message.timeout_s, above_zero=True)
    if timeout_s > TIMEOUT_MAX_S:
        raise InvalidInputError(f"timeout_s: {timeout_s} s; expected at most {TIMEOUT_MAX_S:.0f} s")
    return AdviceRequest(
        deployment=fields.deployment_id("deployment", message.deployment),
        engine=fields.name("engine", message.engine),
        origin=whole("origin", message.origin, least=1),
        sequence=whole("sequence", message.sequence, least=1),
        model=fields.name("model", message.model),
        layer_ids=layer_ids,
        rank_ids=rank_ids,
        nodes=tuple(fields.name("nodes", node) for node in message.nodes),
        num_logical=num_logical,
        dispatch=message.dispatch,
        num_groups=whole("num_groups", message.num_groups, least=1, most=num_logical),
        load=_load(message, len(layer_ids), num_logical),
        current=current,
        digest=message.digest,
        expert_bytes=tuple(whole("expert_bytes", size, most=EXPERT_BYTES_MAX) for size in message.expert_bytes),
        steps=whole("steps", message.steps, most=EXTENT_MAX),
        step_time_s=fields.seconds("step_time_s", message.step_time_s),
        timeout_s=timeout_s,
        copied_generation=GenerationNumber(whole("copied_generation", message.copied_generation)),
        copied_s=fields.seconds("copied_s", message.copied_s),
        copy_held_steps=message.copy_held_steps,
    )


def _current(
    message: adviser_pb2.AdviseRequest, num_layers: int, num_ranks: int, num_logical: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """The map, checked against its digest and against what a map is."""
    current = array_from_pb(message.current, "current", dtypes="i", shape=(num_layers, "P"))
    num_slots = current.shape[1]
    if current.dtype != np.int32 or num_slots < num_logical or num_slots % num_ranks:
        raise InvalidInputError(
            f"current: {current.dtype} of {num_slots} slots for {num_logical} experts on {num_ranks} ranks; expected int32, a"
            " slot for each expert at least, and as many on each rank:"
            f" {fewest_slots(num_logical, num_ranks, at_least=num_slots)}"
        )
    low, high = int(current.min()), int(current.max())
    if low < -1 or high >= num_logical:
        raise InvalidInputError(f"current: experts {low} to {high}; expected -1 (empty) to {num_logical - 1}")
    digest = map_digest(current)
    if digest != message.digest:
        raise InvalidInputError(f"digest: {message.digest:#x}, but the map that came with it has {digest:#x}")
    return current


def _load(
    message: adviser_pb2.AdviseRequest, num_layers: int, num_logical: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The load: finite whole numbers, not negative."""
    load = array_from_pb(message.load, "load", dtypes="f", shape=(num_layers, num_logical))
    if load.dtype != np.float64:
        raise InvalidInputError(f"load: {load.dtype}; expected float64")
    odd = ~(np.isfinite(load) & (load >= 0) & (load <= LOAD_MAX)) | (load != np.floor(load))
    if odd.any():
        layer, expert = np.argwhere(odd)[0].tolist()
        raise InvalidInputError(
            f"load: {load[layer, expert]} token assignments of layer {message.layer_ids[layer]} to expert {expert}; expected"
            f" a whole number from 0 to {LOAD_MAX}"
        )
    return load


def advice_to_pb(value: Advice) -> adviser_pb2.AdviseReply:
    """An answer."""
    return adviser_pb2.AdviseReply(
        origin=whole("origin", value.origin, least=1),
        sequence=whole("sequence", value.sequence, least=1),
        move=value.move,
        generation=whole("generation", value.generation),
        digest=whole("digest", value.digest),
        reason=fields.text(value.reason),
        rows=array_to_pb(value.rows, "rows") if value.rows is not None else None,
    )


def advice_from_pb(message: adviser_pb2.AdviseReply, request: AdviceRequest) -> Advice:
    """The answer to a question. Raises InvalidInputError for one of another question, of another shape or digest."""
    asked, answered = (request.origin, request.sequence), (message.origin, message.sequence)
    if asked != answered:
        raise InvalidInputError(f"the answer is to question {answered}, asked was {asked}")
    if message.move != message.HasField("rows"):
        raise InvalidInputError(f"rows: the answer says {'move' if message.move else 'keep'} and comes with the other's fields")
    rows = None
    if message.move:
        rows = array_from_pb(message.rows, "rows", dtypes="i", shape=request.current.shape)
        if rows.dtype != np.int32:
            raise InvalidInputError(f"rows: {rows.dtype}; expected int32")
        if map_digest(rows) != message.digest:
            raise InvalidInputError(f"digest: {message.digest:#x}, but the rows that came with it have {map_digest(rows):#x}")
    return Advice(
        origin=message.origin,
        sequence=message.sequence,
        move=message.move,
        generation=GenerationNumber(whole("generation", message.generation)),
        digest=message.digest,
        reason=fields.text(message.reason),
        rows=rows,
    )
