"""Main function of a rank process: load the model, join the group, start the hook, then serve, in one group after another."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist

from agent.engine.port import EngineDescription, EnginePort
from agent.engine.reference.config import LayerShape, RankConfig
from agent.engine.reference.engine import NoHook, ReferenceEngine, StepHook
from agent.engine.reference.exchange import ExpertExchange
from agent.engine.reference.experts import LayerExperts, carried_row, check_row_independence, linear_row, load_layer
from agent.engine.reference.front_door import FrontDoor
from agent.engine.reference.group import RankGroup, form_group
from agent.engine.reference.model import ServedModel, device_of, model_digest, resolve
from agent.engine.reference.orders import JOINED, LOADED, STOPPED, End, Form, Formed, LauncherLink, Ready, Standing
from agent.engine.reference.port import ExitCode, ReferencePort, describe, leave
from agent.engine.reference.scheduler import Scheduler
from agent.engine.reference.server import RankServer, Served
from agent.engine.reference.sources import expert_sources
from agent.engine.reference.survive import Reaction, reaction_to
from agent.hook.config import HookConfig
from agent.hook.hook import Hook
from agent.transfer.backup import ExpertSource
from agent.transfer.gloo import first_line
from eplb_service.dispatch import Dispatch
from eplb_service.errors import EplbError, InvalidInputError
from eplb_service.ids import Incarnation, LayerRef
from eplb_service.parent_death import die_with_parent
from eplb_service.placement import EMPTY_SLOT

_LOG = logging.getLogger(__name__)


def run_rank(config: RankConfig, launcher: Connection) -> None:
    """Be one rank until told to stop; ends the process itself.

    Args:
        config: Which rank of which fleet.
        launcher: Gets LOADED, JOINED and Ready; when its other end closes, the launcher is gone and so is this rank. What
            else goes over it: `orders`.
    """
    die_with_parent(os.getppid())  # the fork server, which dies with the launcher
    os.environ.update(config.environment)
    open_log(config)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the launcher decides
    link = LauncherLink(launcher, on_gone=lambda: leave(ExitCode.STOPPED, "", config.reason_file))
    try:
        rank = Rank(config, link)
        rank.join()
    except (EplbError, dist.DistError) as error:
        leave(ExitCode.START_FAILED, str(error), config.reason_file)
    rank.serve()
    link.report(STOPPED)
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


class Rank:
    """One rank process: what it has loaded, and its life in one group after another."""

    _port: ReferencePort
    _hook: StepHook
    _server: RankServer

    def __init__(self, config: RankConfig, link: LauncherLink) -> None:
        """Load the model and open the door for clients. Raises EplbError when configuration or model cannot be used."""
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._config, self._link = config, link
        self._model = cast("ServedModel", resolve(config.fleet.model_factory)())
        self._layers = load_layers(self._model, config)
        self._digest = model_digest(self._model)
        self._incarnation = Incarnation(secrets.randbits(62) + 1)
        self._device = device_of(self._model)
        self._check_model()
        if config.joins:  # a rank of this id may have been here before
            config.request_socket.unlink(missing_ok=True)
            config.reason_file.unlink(missing_ok=True)
        self._door = FrontDoor(config.request_socket, output_bytes_max=config.fleet.output_bytes_max)
        self._door.watch(link, link.read)
        link.report(LOADED)
        self._number = 0  # of the group that this rank is in, or tries to form
        self._rank_ids = config.fleet.rank_ids  # those that the tables are of
        self._began = False

    def _check_model(self) -> None:
        model = self._model
        inputs = model.embed(torch.arange(min(24, model.config.vocabulary), device=self._device))
        if not self._config.joins:
            check_row_independence(model, self._layers[0], model.route(self._layers[0].layer_id, inputs).inputs)
        if self._config.fleet.survives and not hasattr(model.new_cache(), "truncate"):
            raise InvalidInputError(
                f"{self._config.fleet.model_factory} cannot survive the loss of a rank: its caches have no method `truncate`"
            )
        if self._config.fleet.survives and self._device.type != "cpu":
            raise InvalidInputError(
                f"a fleet on {self._device.type} cannot survive the loss of a rank: only gloo tells of one by an error"
            )

    def join(self) -> None:
        """Form the group that the fleet starts with, or wait to be taken into one that serves.

        Raises:
            EplbError: the ranks disagree, or some did not come in time.
            torch.distributed.DistError: the group could not be formed.
        """
        config, num_experts = self._config, self._model.config.num_experts
        width = config.fleet.table_width(num_experts)
        shape = LayerShape(num_experts=num_experts, slots=config.fleet.slots(num_experts), table_width=width)
        ready = Ready(shape=shape)
        if config.joins:
            self._link.report(ready)
            self._form_again()
            return
        group = form_group(config.fleet, config.position, digest=self._digest, device=self._device)
        self._link.report(JOINED)
        self._begin(group)
        self._link.report(ready)

    def serve(self) -> None:
        """Serve until all ranks were told to stop. Ends the process when this rank must not go on."""
        while True:
            try:
                if self._server.serve() is Served.STOPPED:
                    self._server.close()
                    return
                why = "halted by the launcher"
            except (EplbError, RuntimeError) as error:
                why = self._survived(error)
            self._stand(why)
            self._form_again()

    # ── from one group to the next ───────────────────────────────────────────────────────────────────────────────────────

    def _survived(self, error: Exception) -> str:
        """Why the group is lost; ends the process where that does not help."""
        if isinstance(error, EplbError):
            text = str(error)
        else:  # what torch raises when a collective fails: gloo has no class of its own for a peer that is gone
            step = max(0, self._server.engine.boundary - 1)
            text = f"step {step} failed; a peer is gone or stuck, or the model raised: {first_line(error)}"
        if reaction_to(error, survives=self._config.fleet.survives) is Reaction.LEAVE:
            self._leave(text)
        return text

    def _stand(self, why: str) -> None:
        _LOG.warning("engine.stands: %s", why)
        self._server.leave()
        self._link.report(Standing(number=self._number, reason=why, steps=self._server.engine.steps))

    def _form_again(self) -> None:
        """Form the groups that the launcher names until one is formed."""
        while True:
            order = self._link.next_form(after=self._number)
            if isinstance(order, End):
                self._leave(order.reason)
            self._number = order.number
            group, joins = None, not self._began
            try:
                group = self._meet(order)
                self._enter(group)
            except (EplbError, RuntimeError) as error:
                if reaction_to(error, survives=True) is Reaction.LEAVE or (joins and self._began):
                    self._leave(str(error))  # a hook that has just started cannot tell where it stands
                if group is not None:
                    group.leave()
                self._link.report(
                    Standing(number=order.number, reason=f"no group {order.number}: {first_line(error)}", steps=0)
                )
            else:
                self._link.report(Formed(number=order.number))
                return

    def _meet(self, order: Form) -> RankGroup:
        return form_group(
            order.fleet,
            order.position,
            digest=self._digest,
            device=self._device,
            number=order.number,
            timeout_s=order.fleet.form_timeout_s,
            is_superseded=lambda: self._is_superseded(order.number),
        )

    def _is_superseded(self, number: int) -> bool:
        self._link.take()
        return self._link.is_halted(number)

    def _enter(self, group: RankGroup) -> None:
        """Serve in a group that was met. Tables, sizes and the boundary are its own; experts stay in their slots.

        Raises RuntimeError when a rank is lost meanwhile, EplbError when the hook says that this rank must not serve on.
        """
        fleet, joins = group.fleet, not self._began
        num_experts = self._model.config.num_experts
        for layer in self._layers:
            row = layer.tables.physical_to_logical.cpu().numpy().astype(np.int32)
            carried = carried_row(row, self._rank_ids, fleet.rank_ids)
            width = fleet.table_width(num_experts)
            layer.regroup(carried, position=group.position, nodes=fleet.nodes, table_width=width)
        self._rank_ids = fleet.rank_ids
        if joins:
            self._begin(group)
        else:
            self._port.description = self._describe(group)
            self._hook.reform()
        if isinstance(self._hook, NoHook):
            self._share_rows()
        engine = self._server.engine
        ahead = torch.tensor([max(engine.boundary, self._hook.status.boundary)], device=self._device)
        dist.all_reduce(ahead, op=dist.ReduceOp.MAX)
        engine.regroup(ExpertExchange(self._model, fleet.num_ranks), boundary=int(ahead.item()))
        if not joins:
            self._server.enter(group)

    def _share_rows(self) -> None:
        """Nobody watches this engine: a rank that joins takes the map of the others, which never change theirs."""
        for layer in self._layers:
            dist.all_reduce(layer.tables.physical_to_logical, op=dist.ReduceOp.MAX)  # -1, an empty slot, is less than any
            layer.derive_tables()

    def _begin(self, group: RankGroup) -> None:
        """Make all that serves, in the first group of this process."""
        config = replace(self._config, fleet=group.fleet, position=group.position)
        fleet, model = group.fleet, self._model
        self._port = ReferencePort(
            description=self._describe(group),
            layers={LayerRef(fleet.model_name, layer.layer_id): layer for layer in self._layers},
            reason_file=config.reason_file,
            device=self._device,
            can_reform=fleet.survives,
        )
        self._hook = make_hook(config, self._port, model)
        self._hook.start()
        self._began = True
        engine = ReferenceEngine(
            model=model,
            layers=self._layers,
            exchange=ExpertExchange(model, fleet.num_ranks),
            hook=self._hook,
            model_name=fleet.model_name,
            dummy_tokens=fleet.dummy_tokens,
            survives=fleet.survives,
        )
        scheduler = Scheduler(
            batch_max=fleet.batch_max,
            queue_max=fleet.queue_max,
            prefill_tokens_max=fleet.prefill_tokens_max,
            context=model.config.context,
            vocabulary=model.config.vocabulary,
            new_cache=model.new_cache,
        )
        self._server = RankServer(
            group=group,
            engine=engine,
            hook=self._hook,
            scheduler=scheduler,
            door=self._door,
            is_halted=lambda: self._link.is_halted(self._number),
        )

    def _describe(self, group: RankGroup) -> EngineDescription:
        joins = self._config.joins and not self._began
        return describe(group, self._layers, digest=self._digest, incarnation=self._incarnation, joins=joins)

    def _leave(self, reason: str) -> NoReturn:
        leave(ExitCode.STEP_FAILED, reason, self._config.reason_file)


def load_layers(model: ServedModel, config: RankConfig) -> list[LayerExperts]:
    """This rank's slots of all MoE layers, filled by the linear placement; empty, like all, on a rank that joins."""
    num_experts = model.config.num_experts
    slots = config.fleet.slots(num_experts)
    num_physical = slots * config.fleet.num_ranks
    row = linear_row(num_experts=num_experts, num_physical=num_physical)
    if config.joins:
        row = np.full(num_physical, EMPTY_SLOT, np.int32)
    return [
        load_layer(
            model,
            layer_id,
            row,
            position=config.position,
            slots=slots,
            table_width=config.fleet.table_width(num_experts),
            dispatch=Dispatch(config.fleet.dispatch),
            nodes=config.fleet.nodes,
        )
        for layer_id in model.moe_layer_ids()
    ]


def make_hook(config: RankConfig, port: ReferencePort, model: ServedModel) -> StepHook:
    """The hook that the configuration asks for: a test's own, the real one, or none."""
    if config.fleet.hook_factory:
        return cast("StepHook", resolve(config.fleet.hook_factory)(port, config))
    if config.hook_socket is None:
        return NoHook()
    restores = config.fleet.survives and config.fleet.restores
    return real_hook(port, config, sources=expert_sources(model) if restores else ())


def real_hook(port: EnginePort, config: RankConfig, *, sources: Sequence[ExpertSource] = ()) -> Hook:
    """The product's hook over this port. Raises InvalidInputError when the rank has no hook socket.

    sources: where experts can be had that no rank holds.
    """
    fleet = config.fleet
    meeting = {"rendezvous_timeout_s": fleet.form_timeout_s} if fleet.survives else {}
    options = {**meeting, **fleet.hook_options}
    return Hook(
        port,
        HookConfig(
            socket_path=config.hook_socket or "",
            staging_bytes=fleet.staging_bytes,
            vote_period=fleet.vote_period,
            window_steps=fleet.window_steps,
            **options,
        ),
        sources=sources,
    )
