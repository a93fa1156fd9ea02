"""Main function of a rank process: load the model, join the group, start the hook, then serve."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from agent.engine.port import EngineDescription, EngineModel, EnginePort
from agent.engine.reference.config import RankConfig
from agent.engine.reference.engine import NoHook, ReferenceEngine, StepHook
from agent.engine.reference.exchange import ExpertExchange
from agent.engine.reference.experts import LayerExperts, check_row_independence, linear_row, load_layer
from agent.engine.reference.front_door import FrontDoor
from agent.engine.reference.model import ServedModel, device_of, model_digest, resolve
from agent.engine.reference.port import ExitCode, ReferencePort, leave
from agent.engine.reference.scheduler import Scheduler
from agent.engine.reference.server import RankServer
from agent.engine.reference.wake import WakeMesh
from agent.hook.config import HookConfig
from agent.hook.hook import Hook
from eplb_service.control import Address, LayerInfo
from eplb_service.dispatch import Dispatch
from eplb_service.errors import EnvironmentFault, EplbError
from eplb_service.ids import GroupId, Incarnation, LayerRef
from eplb_service.parent_death import die_with_parent

# Names of what a starting rank reports to its launcher, in order.
LOADED, JOINED, READY = "model loaded", "group joined", "ready"


def run_rank(config: RankConfig, launcher: Connection) -> None:
    """Be one rank until told to stop; ends the process itself.

    Args:
        config: Which rank of which fleet.
        launcher: Gets LOADED, JOINED and READY; when its other end closes, the launcher is gone and so is this rank.
    """
    die_with_parent(os.getppid())  # the fork server, which dies with the launcher
    os.environ.update(config.environment)
    open_log(config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the launcher decides
    try:
        server = start_rank(config, launcher.send)
    except (EplbError, dist.DistError) as error:
        leave(ExitCode.START_FAILED, str(error), config.reason_file)
    server.door.watch(launcher, lambda: leave(ExitCode.STOPPED, "", config.reason_file))
    launcher.send(READY)
    try:
        server.serve()
        server.close()
    except EplbError as error:
        leave(ExitCode.STEP_FAILED, str(error), config.reason_file)
    except RuntimeError as error:
        # What torch raises when a collective fails: gloo has no class of its own for a peer that is gone.
        text = f"step {server.engine.boundary - 1} failed; a peer is gone or stuck, or the model raised: {error}"
        leave(ExitCode.STEP_FAILED, text, config.reason_file)
    leave(ExitCode.STOPPED, "", config.reason_file)


def open_log(config: RankConfig) -> None:
    """Send what this process says to its log file, if it has one, and give log lines the name of the rank."""
    if config.fleet.log_to_files:
        descriptor = os.open(config.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    level = logging.INFO if config.fleet.log_to_files else logging.WARNING
    logging.basicConfig(level=level, format=f"%(asctime)s rank-{config.rank_id} %(levelname)s %(message)s", force=True)


def start_rank(config: RankConfig, report: Callable[[str], None]) -> RankServer:
    """Load the model, join the group and start the hook.

    Raises:
        EplbError: the configuration or model cannot be used, the ranks disagree, or some did not come in time.
        torch.distributed.DistError: the group could not be formed.
    """
    fleet = config.fleet
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = cast("ServedModel", resolve(fleet.model_factory)())
    layers = load_layers(model, config)
    digest = model_digest(model)
    inputs = model.embed(torch.arange(min(24, model.config.vocabulary), device=device_of(model)))
    check_row_independence(model, layers[0], model.route(layers[0].layer_id, inputs).inputs)
    door = FrontDoor(config.request_socket, output_bytes_max=fleet.output_bytes_max)
    report(LOADED)
    store = join_group(config, model, digest)
    mesh = WakeMesh(
        PrefixStore("wake", store),
        position=config.position,
        num_ranks=fleet.num_ranks,
        host=fleet.rendezvous_host,
        timeout_s=fleet.start_timeout_s,
    )
    door.watch(mesh, mesh.read)
    report(JOINED)
    port = ReferencePort(
        description=describe(config, model, layers, digest, group_id=int(store.get("group_id"))),
        layers={LayerRef(fleet.model_name, layer.layer_id): layer for layer in layers},
        reason_file=config.reason_file,
        device=device_of(model),
    )
    hook = make_hook(config, port)
    hook.start()
    engine = ReferenceEngine(
        model=model,
        layers=layers,
        exchange=ExpertExchange(model, fleet.num_ranks),
        hook=hook,
        model_name=fleet.model_name,
        dummy_tokens=fleet.dummy_tokens,
    )
    scheduler = Scheduler(
        batch_max=fleet.batch_max,
        queue_max=fleet.queue_max,
        prefill_tokens_max=fleet.prefill_tokens_max,
        context=model.config.context,
        vocabulary=model.config.vocabulary,
        new_cache=model.new_cache,
    )
    return RankServer(config=config, engine=engine, hook=hook, scheduler=scheduler, door=door, mesh=mesh)


def load_layers(model: ServedModel, config: RankConfig) -> list[LayerExperts]:
    """This rank's slots of all MoE layers, filled by the linear placement."""
    num_experts = model.config.num_experts
    slots = config.fleet.slots(num_experts)
    num_physical = slots * config.fleet.num_ranks
    row = linear_row(num_experts=num_experts, num_physical=num_physical)
    # Wide enough for every map that covers all experts.
    width = num_physical - num_experts + 1
    return [
        load_layer(
            model,
            layer_id,
            row,
            position=config.position,
            slots=slots,
            table_width=width,
            dispatch=Dispatch(config.fleet.dispatch),
            nodes=config.fleet.nodes,
        )
        for layer_id in model.moe_layer_ids()
    ]


def join_group(config: RankConfig, model: ServedModel, digest: str) -> TCPStore:
    """Form the engine's process group, and check that all ranks have loaded the same model.

    Raises:
        EnvironmentFault: the ranks hold different models.
        torch.distributed.DistError: some rank did not come in time.
    """
    fleet = config.fleet
    first = config.position == 0
    if fleet.rendezvous_host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=fleet.start_timeout_s)
    store = TCPStore(fleet.rendezvous_host, fleet.engine_port, fleet.num_ranks, is_master=first, timeout=timeout)
    if first:
        store.set("group_id", str(secrets.randbits(62) + 1))
        store.set("digest", digest)
    theirs = store.get("digest").decode()
    if theirs != digest:
        raise EnvironmentFault(
            f"rank {config.rank_id} loaded a model with digest {digest}, rank {fleet.rank_ids[0]} one with {theirs};"
            " give all ranks the same weights"
        )
    dist.init_process_group(
        "nccl" if device_of(model).type == "cuda" else "gloo",
        store=PrefixStore("engine", store),
        rank=config.position,
        world_size=fleet.num_ranks,
        timeout=timedelta(seconds=fleet.step_timeout_s),
    )
    dist.barrier()
    return store


def describe(
    config: RankConfig, model: ServedModel, layers: list[LayerExperts], digest: str, *, group_id: int
) -> EngineDescription:
    """What the hook is told of this engine."""
    fleet = config.fleet
    num_experts = model.config.num_experts
    infos = tuple(
        LayerInfo(layer_id=layer.layer_id, num_logical=num_experts, slots=layer.num_slots, expert_bytes=layer.expert_bytes)
        for layer in layers
    )
    initial = {layer.layer_id: tuple(layer.tables.physical_to_logical.tolist()) for layer in layers}
    return EngineDescription(
        deployment=fleet.deployment,
        address=Address(config.rank_id, Incarnation(secrets.randbits(62) + 1), GroupId(group_id)),
        node=config.node,
        group_rank_ids=fleet.rank_ids,
        nodes=fleet.nodes,
        phase=fleet.phase,
        stage=fleet.stage,
        models=(EngineModel(name=fleet.model_name, digest=digest, layers=infos, initial=initial),),
        capacity=fleet.capacity,
        dispatch=layers[0].dispatch,
        replica_table_width=int(layers[0].tables.logical_to_physical.shape[1]),
        rendezvous_host=fleet.rendezvous_host,
        rendezvous_port=fleet.hook_port,
    )


def make_hook(config: RankConfig, port: ReferencePort) -> StepHook:
    """The hook that the configuration asks for: a test's own, the real one, or none."""
    if config.fleet.hook_factory:
        return cast("StepHook", resolve(config.fleet.hook_factory)(port, config))
    return NoHook() if config.hook_socket is None else real_hook(port, config)


def real_hook(port: EnginePort, config: RankConfig) -> Hook:
    """The product's hook over this port. Raises InvalidInputError when the rank has no hook socket."""
    fleet = config.fleet
    return Hook(
        port,
        HookConfig(
            socket_path=config.hook_socket or "",
            staging_bytes=fleet.staging_bytes,
            vote_period=fleet.vote_period,
            window_steps=fleet.window_steps,
            **fleet.hook_options,
        ),
    )
