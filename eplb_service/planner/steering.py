"""What changes a deployment on purpose: the planning loop's own decisions, and operators' orders, each of them once.

An order carries an idempotency key: its answer is stored in the same write as the generation that it made, so that the same
key gives the same answer whatever happened in between, also to a planner that was killed before it could answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from eplb_service.config import MODES
from eplb_service.errors import ConflictError, EplbError, InvalidInputError
from eplb_service.gate import Verdict, VerdictCode
from eplb_service.generation import ROLLBACK
from eplb_service.membership.machine import Group
from eplb_service.placement import Placement, Table
from eplb_service.planner.deciding import decide, why_stale
from eplb_service.planner.deployment import Deployment
from eplb_service.planner.documents import KEY_CHARACTERS_MAX, RequestRecord, Settings, VerdictRecord
from eplb_service.planner.draining import Draining, named
from eplb_service.planner.loads import imbalance_under
from eplb_service.planner.proposing import Choice, Decision, moves_between, nothing_to_gain, same_shape, why_not_carried
from eplb_service.planner.publishing import UNKNOWN, Content, publish
from eplb_service.planner.validating import Fault, Validating
from eplb_service.policy.registry import policy_names

ORDERS_MAX = 64
REASON_CHARACTERS_MAX = 1024


@dataclass(slots=True)
class _Order:
    asked: str
    task: asyncio.Task[RequestRecord]


class Steering:
    """Decides and publishes for one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.draining = Draining(deployment)
        self._validating = Validating(deployment)
        self._planned_at_s = float("-inf")
        self._planned_windows = 0
        self._loop: asyncio.Task[None] | None = None
        self._orders: dict[str, _Order] = {}
        self._log = structlog.get_logger("eplb.planner").bind(deployment=deployment.name)

    def start(self) -> None:
        """Begin to lead and to plan."""
        self.deployment.start()
        self._loop = asyncio.create_task(self._plan_forever(), name=f"plans of {self.deployment.name}")

    async def stop(self, timeout_s: float) -> None:
        """Cancel plans and orders that are not stored yet, then give the lead up."""
        tasks: list[asyncio.Task[Any]] = [order.task for order in self._orders.values()]
        if self._loop is not None:
            tasks.append(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.deployment.stop(timeout_s)

    # ── the loop's own ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _plan_forever(self) -> None:
        """Plan after a window closed, not more often than `planning.interval_s`."""
        deployment = self.deployment
        interval_s, clock = deployment.context.config.planning.interval_s, deployment.context.clock
        while True:
            await deployment.plan_wanted.wait()
            deployment.plan_wanted.clear()
            await self._guarded(self._validate, "validation")
            if deployment.restoring.is_due:  # before anything else: tokens that choose lost experts cannot be served
                await self._guarded(deployment.restoring.go_on, "restore")
                continue
            if self.draining.is_due:  # before anything is planned for balance
                await self._guarded(self.draining.go_on, "drain")
                continue
            wait_s = self._planned_at_s + interval_s - clock.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if deployment.load.num_closed == self._planned_windows or deployment.why_not_plan():
                continue
            self._planned_at_s = clock.monotonic()
            self._planned_windows = deployment.load.num_closed
            await self._guarded(self.plan_once, "plan")

    async def _guarded(self, act: Callable[[], Awaitable[None]], what: str) -> None:
        """Do it; a failure is told, and the loop goes on with the next window."""
        deployment = self.deployment
        try:
            await act()
        except EplbError as error:
            if str(error) != deployment.last_error:
                self._log.warning(f"{what}.failed", reason=str(error))
            deployment.last_error = str(error)
        except Exception as error:  # noqa: BLE001  (whatever it is, the next window may do)
            self._log.exception(f"{what}.broke")
            deployment.last_error = f"{what} failed ({type(error).__name__}); see the log"

    async def _validate(self) -> None:
        """Look at the live generation; roll it back when it made things worse and that is wanted."""
        deployment = self.deployment
        fault = await self._validating.look()
        if fault is None or deployment.ledger.settings.mode != "auto" or not deployment.context.validation.roll_back:
            return
        async with deployment.planning:
            live, group = deployment.live, deployment.group
            if deployment.why_not_plan() or live is None or group is None or live.digest != fault.live_digest:
                return
            layers_max = deployment.context.config.rollout.layers_per_chunk_max
            why = why_not_carried(live.placement, fault.previous, group, layers_max)
            if why:
                deployment.last_error = f"generation {fault.generation} cannot be rolled back: {why}"
                return
            await self._undo(fault, live.placement, group)

    async def _undo(self, fault: Fault, live: Placement, group: Group) -> None:
        """Publish what was live before a generation that made things worse. Call with `planning` held."""
        deployment = self.deployment
        reason = f"move: generation {fault.generation} is rolled back: {fault.reason}"
        verdict = VerdictRecord(
            move=True, code="worse_than_before", reason=reason, decided_at_s=deployment.context.clock.wall()
        )
        deployment.record_verdict(verdict)
        window = deployment.window()
        content = Content(
            target=fault.previous,
            before=imbalance_under(window, live, group) if window is not None else UNKNOWN,
            predicted=imbalance_under(window, fault.previous, group) if window is not None else UNKNOWN,
            lower_bound=UNKNOWN,
            moves=moves_between(live, fault.previous, group),
            policy=ROLLBACK,
            reason=reason,
        )
        await publish(deployment, content, None, verdict)
        self._validating.undone(fault)

    async def plan_once(self) -> None:
        """Plan, ask the gate, publish when it says move and the mode is `auto`."""
        deployment = self.deployment
        async with deployment.planning:
            early = self._screened()
            if early is not None:
                deployment.record_verdict(early)
                return
            decision = await decide(deployment, deployment.ledger.settings.policy)
            verdict = self._verdict(decision)
            deployment.record_verdict(verdict)
            deployment.last_error = ""
            if not verdict.move or deployment.ledger.settings.mode != "auto" or deployment.why_not_plan():
                return
            stale = why_stale(deployment, decision)
            if stale:
                deployment.record_verdict(dataclasses.replace(verdict, move=False, code="expired", reason=f"keep: {stale}"))
                return
            await publish(self.deployment, self._content(decision, decision.choice, verdict.reason), None, verdict)

    def _screened(self) -> VerdictRecord | None:
        """The answer where the load needs no plan, since the solver is dear."""
        deployment = self.deployment
        group, live = deployment.group, deployment.live
        window = deployment.window()
        if group is None or live is None or window is None:
            return None
        forecast = deployment.learning.forecasting.forecast()
        ahead = window if forecast is None else forecast.applied(window)
        verdict = nothing_to_gain(deployment.context.gate, imbalance_under(ahead, live.placement, group))
        if verdict is not None and forecast is not None:
            verdict = dataclasses.replace(verdict, reason=f"{verdict.reason}; {forecast.words}")
        return self._recorded(verdict) if verdict is not None else None

    async def dry_run(self, policy: str) -> tuple[Decision, VerdictRecord]:
        """A decision that nothing follows from. Raises NotFoundError for an unknown policy, ConflictError."""
        deployment = self.deployment
        policy = policy or deployment.ledger.settings.policy
        _check_policy(policy)
        async with deployment.planning:
            decision = await decide(deployment, policy, dry=True)
        return decision, self._verdict(decision)

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def rebalance(self, *, key: str, force: bool, policy: str) -> RequestRecord:
        """Plan, publish and roll out now; `force` skips the gate. Generation 0 in the answer: the gate said keep.

        Raises ConflictError when nothing can be published now, NotFoundError for an unknown policy.
        """
        _check_policy(policy or self.deployment.ledger.settings.policy)
        asked = f"rebalance{' by force' if force else ''} with policy {policy or 'of the deployment'}"
        return await self._once(key, asked, lambda: self._rebalance(key, asked, force=force, policy=policy))

    async def rollback(self, *, key: str, generation: int) -> RequestRecord:
        """Publish a new generation with the content of an older one. Raises NotFoundError, ConflictError."""
        asked = f"roll back to generation {generation}"
        return await self._once(key, asked, lambda: self._rollback(key, asked, generation))

    async def drain(self, *, key: str, ranks: Sequence[int], node: str) -> RequestRecord:
        """Move everything off ranks that are to be stopped, and keep it off. Raises ConflictError, InvalidInputError."""
        asked = f"drain {named(ranks, node)}"
        return await self._once(key, asked, lambda: self.draining.drain(key, asked, ranks, node))

    async def pause(self, reason: str) -> Settings:
        """No new generations; a rollout under way stops after its open chunk."""
        reason = _checked_reason(reason)
        settings = await self._change(paused=True, pause_reason=reason)
        self.deployment.cancel_rollout(f"paused: {reason or 'no reason given'}", by="pause", withdraw=False)
        return settings

    async def resume(self) -> Settings:
        """Plan again; what was given up is tried again."""
        settings = await self._change(paused=False, pause_reason="")
        self.deployment.restoring.start_over()
        self.deployment.plan_wanted.set()
        return settings

    async def set_mode(self, mode: str) -> Settings:
        """`observe`, `auto`, or `pinned`: only a rollback changes what is live."""
        if mode not in MODES:
            raise InvalidInputError(f"mode {mode[:40]!r} is unknown: use {' or '.join(MODES)}")
        settings = await self._change(mode=mode)
        self.deployment.plan_wanted.set()
        return settings

    async def _change(self, **changes: Any) -> Settings:
        return await self.deployment.change_settings(lambda settings: dataclasses.replace(settings, **changes))

    async def _once(self, key: str, asked: str, act: Callable[[], Awaitable[RequestRecord]]) -> RequestRecord:
        """Do it, or wait for who does it already, or answer what was answered. The caller may go away meanwhile."""
        if not 1 <= len(key) <= KEY_CHARACTERS_MAX or not key.isprintable():
            raise InvalidInputError(
                f"idempotency key of {len(key)} characters: give 1 to {KEY_CHARACTERS_MAX} printable characters"
            )
        order = self._orders.get(key)
        if order is None:
            if len(self._orders) >= ORDERS_MAX:
                raise ConflictError(f"{ORDERS_MAX} orders for {self.deployment.name} are under way already; try again later")
            task = asyncio.create_task(self._answer(key, asked, act), name=f"order for {self.deployment.name}")
            order = self._orders[key] = _Order(asked, task)
            task.add_done_callback(lambda done: self._done(key, done))
        elif order.asked != asked:
            raise ConflictError(f"idempotency key {key!r} is in use to {order.asked}, now to {asked}: use another key")
        return await asyncio.shield(order.task)

    def _done(self, key: str, task: asyncio.Task[RequestRecord]) -> None:
        self._orders.pop(key, None)
        if not task.cancelled():
            task.exception()  # a caller that went away leaves it: looked at here

    async def _answer(self, key: str, asked: str, act: Callable[[], Awaitable[RequestRecord]]) -> RequestRecord:
        return await self.deployment.ledger.answer_to(key, asked) or await act()

    async def _rebalance(self, key: str, asked: str, *, force: bool, policy: str) -> RequestRecord:
        deployment = self.deployment
        async with deployment.planning:
            if deployment.ledger.settings.mode == "pinned":
                raise ConflictError(
                    f"{deployment.name} is pinned: what is live stays; `eplb mode observe` or `eplb mode auto` lifts the pin,"
                    " `eplb rollback` restores a generation of your choice"
                )
            self.deployment.check_plannable()
            decision = await decide(deployment, policy or deployment.ledger.settings.policy)
            verdict = self._verdict(decision)
            choice = decision.choice
            changes = decision.verdict.code is not VerdictCode.NO_CHANGE
            if force and changes and not verdict.move:
                choice = decision.own  # the gate was not asked: what the policy wanted
                why = self._why_not_carried(choice)
                if why:
                    raise ConflictError(f"{deployment.name} cannot roll this plan out: {why}")
                reason = f"move: forced by an operator; the gate said {decision.verdict.reason}"
                verdict = dataclasses.replace(verdict, move=True, code="forced", reason=reason)
            deployment.record_verdict(verdict)
            record = RequestRecord(key=key, asked=asked, generation=0, verdict=verdict)
            if not verdict.move:
                puts = deployment.ledger.request_puts(record)
                await deployment.commit(puts.puts, puts.expects, puts.deletes)
                deployment.ledger.remember(record)
                return record
            self.deployment.check_plannable()
            stale = why_stale(deployment, decision)
            if stale:
                raise ConflictError(f"nothing was published: {stale}; try again")
            return await publish(self.deployment, self._content(decision, choice, verdict.reason), record, verdict) or record

    def _why_not_carried(self, choice: Choice) -> str:
        deployment = self.deployment
        group, live = deployment.group, deployment.live
        if group is None or live is None:
            return "the group was lost meanwhile"
        layers_max = deployment.context.config.rollout.layers_per_chunk_max
        return why_not_carried(live.placement, choice.target, group, layers_max)

    async def _rollback(self, key: str, asked: str, number: int) -> RequestRecord:
        deployment = self.deployment
        source = await deployment.ledger.generation(number) if number else None
        self._check_leads()
        # An order to go back must not wait for the rollout that it is to undo.
        deployment.cancel_rollout(asked, by="rollback", withdraw=True)
        async with deployment.planning:
            deployment.cancel_rollout(asked, by="rollback", withdraw=True)
            await deployment.wait_until_free()
            self.deployment.check_plannable()
            group, live = deployment.group, deployment.live
            if group is None or live is None:
                raise ConflictError(f"{deployment.name} lost its group meanwhile; try again")
            target = source.placement if source is not None else self._as_loaded(live.placement)
            if not same_shape(target, live.placement):
                raise ConflictError(
                    f"generation {number} of {deployment.name} was made for other ranks, layers or slots than there are now"
                )
            if group.observe_only:
                raise ConflictError(f"{deployment.name} cannot roll anything out: {group.observe_only}")
            try:
                target = group.with_fitting_shares(target)
            except InvalidInputError as error:
                raise ConflictError(f"generation {number} of {deployment.name} cannot be restored: {error}") from None
            verdict = VerdictRecord(
                move=True,
                code="rollback",
                reason=f"move: an operator asked to {asked}" + ("" if number else " (as loaded by the engine)"),
                decided_at_s=deployment.context.clock.wall(),
            )
            deployment.record_verdict(verdict)
            window = deployment.window()
            content = Content(
                target=target,
                before=imbalance_under(window, live.placement, group) if window is not None else UNKNOWN,
                predicted=imbalance_under(window, target, group) if window is not None else UNKNOWN,
                lower_bound=UNKNOWN,
                moves=moves_between(live.placement, target, group),
                policy=ROLLBACK,
                reason=verdict.reason,
            )
            record = RequestRecord(key=key, asked=asked, generation=0, verdict=verdict)
            return await publish(self.deployment, content, record, verdict) or record

    def _as_loaded(self, live: Placement) -> Placement:
        """What the engine loaded by itself: as it was seen, else slot i holds expert i % E, as engines start."""
        loaded = self.deployment.ledger.loaded
        if loaded is not None and same_shape(loaded, live):
            return loaded
        tables = []
        for table in live.tables:
            linear = Table.linear(
                model=table.model,
                layer_ids=table.layer_ids,
                num_logical=table.num_logical,
                rank_ids=table.rank_ids,
                slots_per_rank=table.slots_per_rank,
            )
            tables.append(linear if table.shares is None else linear.with_even_shares())
        return Placement(tuple(tables))

    # ── what is published ────────────────────────────────────────────────────────────────────────────────────────────────

    def _content(self, decision: Decision, choice: Choice, reason: str) -> Content:
        by_gate = decision.verdict.move and choice is decision.choice and decision.verdict.gain > 0
        return Content(
            target=choice.target,
            before=decision.before,
            predicted=choice.predicted,
            lower_bound=decision.lower_bound,
            moves=choice.moves,
            policy=decision.policy,
            reason=reason,
            promised_gain=decision.verdict.gain if by_gate else None,
            gain_share=decision.verdict.numbers.get("gain_share", 1.0),
            loads=decision.loads,
            serves=decision.serves,
        )

    def _verdict(self, decision: Decision) -> VerdictRecord:
        verdict = decision.verdict
        move, code, reason = verdict.move, verdict.code.value, verdict.reason
        if move and decision.cannot_roll_out:
            move, code, reason = False, "cannot_roll_out", f"keep: {decision.cannot_roll_out} (the gate said {reason})"
        return dataclasses.replace(self._recorded(verdict), move=move, code=code, reason=reason)

    def _recorded(self, verdict: Verdict) -> VerdictRecord:
        return VerdictRecord(
            move=verdict.move,
            code=verdict.code.value,
            reason=verdict.reason,
            decided_at_s=self.deployment.context.clock.wall(),
            numbers=dict(verdict.numbers),
        )

    def _check_leads(self) -> None:
        if not self.deployment.leads:
            raise ConflictError(f"this planner does not lead {self.deployment.name}: {self.deployment.leading.why_not}")


def _check_policy(policy: str) -> None:
    """Raise InvalidInputError for a policy that is not installed."""
    names = policy_names()
    if policy not in names:
        raise InvalidInputError(f"there is no policy {policy[:80]!r}; installed: {', '.join(names) or 'none'}")


def _checked_reason(reason: str) -> str:
    """A reason that can be shown: printable, cut to what fits."""
    cleaned = "".join(character if character.isprintable() else " " for character in reason)
    return cleaned[:REASON_CHARACTERS_MAX]
