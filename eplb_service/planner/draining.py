"""Ranks that are to be stopped: an order that empties them, keeps them empty, and stands until it is taken back.

The order is a setting, so it survives the planner. While something is left to move off a drained rank nothing is planned for
balance (`standing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eplb_service.drain import is_drained, listed, why_not_drained
from eplb_service.errors import ConflictError, EplbError, InvalidInputError
from eplb_service.generation import DRAIN
from eplb_service.ids import RankId
from eplb_service.imbalance import Imbalance
from eplb_service.membership.group import Group
from eplb_service.moves import MoveSummary
from eplb_service.placement import Placement, Table
from eplb_service.planner.documents import RequestRecord, Settings
from eplb_service.planner.publishing import UNKNOWN
from eplb_service.planner.standing import Plan, Standing
from eplb_service.policy.drained import without_drained
from eplb_service.policy.elastic import DEFAULT_TARGET

POLICY = "elastic"
ANY_IMBALANCE = 1e6
"""Target where no load was counted yet: the fewest moves."""


def named(ranks: Sequence[int], node: str) -> str:
    """Ranks for a sentence: `ranks 2, 3`, `node a`, `rank 2 and node a`."""
    parts = []
    if ranks:
        parts.append(f"rank{'s' * (len(set(ranks)) > 1)} {', '.join(map(str, sorted(set(ranks))))}")
    if node:
        parts.append(f"node {node}")
    return " and ".join(parts) or "nothing"


class Draining(Standing):
    """Drains ranks of one deployment."""

    word = DRAIN

    @property
    def is_due(self) -> bool:
        """Whether something is to be moved off a drained rank."""
        deployment = self._deployment
        live, drained = deployment.known_live, deployment.drained
        if not drained or live is None or deployment.members is None:
            return False
        return not is_drained(live.placement, drained, may_keep=deployment.keeps_copies)

    def named_by(self, ranks: Sequence[int], node: str) -> frozenset[RankId]:
        """The drained ranks that an order names, as far as they are known now."""
        members = self._deployment.members
        on_node = _on_node(node, members) if members is not None else frozenset()
        return self._deployment.drained & (on_node | {RankId(rank) for rank in ranks})

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def drain(self, key: str, asked: str, ranks: Sequence[int], node: str) -> RequestRecord:
        """Take the order, and begin. Generation 0 in the answer: nothing was to move, or it could not begin yet.

        Raises InvalidInputError for ranks that are not there, ConflictError when the others cannot hold all experts, and when
        nothing can be published now.
        """
        deployment = self._deployment
        members, live = self._members()
        why = self._why_no_orders()
        if why:
            raise ConflictError(f"{deployment.name} cannot be drained now: {why}")
        chosen = _chosen(ranks, node, members)
        if members.observe_only:
            raise ConflictError(f"{deployment.name} cannot roll anything out: {members.observe_only}")
        drained = deployment.drained | chosen
        why = why_not_drained(live.tables, drained)
        if why:
            raise ConflictError(f"{deployment.name} cannot {asked}: {why}")
        if not chosen <= deployment.drained:
            await deployment.change_settings(lambda settings: _with(settings, chosen))
            return await self._begin(key, asked, withdraw=True)
        return await self._begin(key, asked, withdraw=False)

    async def undrain(self, ranks: Sequence[int], node: str) -> Settings:
        """Give ranks back to planning. Raises InvalidInputError for ranks that are not drained."""
        deployment = self._deployment
        if node:
            self._members()
        unknown, chosen = set(ranks) - deployment.drained, self.named_by(ranks, node)
        if unknown or not chosen:
            known = f"drained are {listed(sorted(deployment.drained))}" if deployment.drained else "no rank is drained"
            what = f"rank {min(unknown)} is not drained" if unknown else f"no rank of {named(ranks, node)} is drained"
            raise InvalidInputError(f"{deployment.name}: {what}; {known}")
        settings = await deployment.change_settings(lambda settings: _without(settings, chosen))
        progress = deployment.carrier.progress
        if progress is not None and progress.generation is not None:
            generation = deployment.ledger.generations.get(progress.generation)
            if generation is not None and generation.policy == DRAIN:
                asked = f"undrain {named(sorted(chosen), '')}"
                deployment.cancel_rollout(asked, by="undrain", withdraw=False)
        deployment.plan_wanted.set()
        return settings

    async def _begin(self, key: str, asked: str, *, withdraw: bool) -> RequestRecord:
        """Publish what the order needs, now if it can be; else the planning loop does, and the answer says why not yet.

        withdraw: what is rolled out now may be on its way to these very ranks, so it is stopped first.
        """
        deployment = self._deployment
        if withdraw:
            deployment.cancel_rollout(asked, by="drain", withdraw=True)
        record = RequestRecord(key=key, asked=asked, generation=0, verdict=self._verdict(asked, move=False))
        async with deployment.planning:
            try:
                if withdraw:  # also what was published while this waited
                    deployment.cancel_rollout(asked, by="drain", withdraw=True)
                    await deployment.wait_until_free()
                deployment.check_plannable()
                if self.is_due:
                    return await self._publish(asked, record) or record
                reason = f"keep: {asked}: nothing is left to move"
            except EplbError as error:
                reason = f"keep: the order to {asked} stands, and is tried again; for now {error}"
            self._wait()
            verdict = dataclasses.replace(record.verdict, reason=reason)
            record = dataclasses.replace(record, verdict=verdict)
            puts = deployment.ledger.request_puts(record)
            await deployment.commit(puts.puts, puts.expects, puts.deletes)
            deployment.ledger.remember(record)
        return record

    # ── what is published ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _asked(self) -> str:
        return f"drain {named(sorted(self._deployment.drained), '')}"

    def _why_not_yet(self) -> str:
        return self._deployment.why_not_plan()

    def _reason(self, asked: str, moves: MoveSummary) -> str:
        return f"move: an operator asked to {asked}: {moves.experts} experts find another rank"

    async def _plan(self, members: Group, live: Placement, before: Imbalance) -> Plan:
        """A placement that leaves nothing on drained ranks: the fewest moves that leave no layer worse than the worst is now.

        Limits on moves are for the sake of balance, and do not hold an operator's order up.
        """
        deployment = self._deployment
        proposer, window, drained = deployment.context.proposer, deployment.window(), deployment.drained
        wanted = max(proposer.planning.max_imbalance or 1.0, DEFAULT_TARGET, *before.per_layer, 1.0)
        tables: list[Table] = []
        bounds: list[float] = []
        notes: list[str] = []
        for table in live.tables:
            problem = proposer.problem(table, window, members)
            free = dataclasses.replace(
                problem,
                constraints=problem.constraints.without_move_limits(),
                max_imbalance=wanted if window is not None else ANY_IMBALANCE,
                front=False,
            )
            problem, given_up = without_drained(free, drained)
            proposal = await proposer.solved(problem, POLICY, drained)
            tables.append(proposal.placement)
            bounds.extend(proposal.lower_bound.per_layer)
            notes += given_up
        return Plan(
            target=Placement(tuple(tables)),
            lower_bound=Imbalance(tuple(bounds)) if window is not None else UNKNOWN,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _members(self) -> tuple[Group, Placement]:
        """The group and what is live. Raises ConflictError while either is not known."""
        deployment = self._deployment
        members, live = deployment.members, deployment.known_live
        if members is None or live is None:
            raise ConflictError(f"{deployment.name} is {deployment.state_text()}; try again then")
        return members, live.placement


def _chosen(ranks: Sequence[int], node: str, members: Group) -> frozenset[RankId]:
    """The ranks that an order names. Raises InvalidInputError for those that are not there, or none at all."""
    topology = members.topology
    chosen = frozenset(topology.rank_ids[topology.position_of(rank)] for rank in ranks) | _on_node(node, members)
    if node and node not in topology.nodes:
        known = ", ".join(sorted(topology.node_names))
        raise InvalidInputError(f"no rank is on node {node[:128]!r}; nodes are {known}")
    if not chosen:
        raise InvalidInputError("name the ranks, or the node, to drain")
    return chosen


def _on_node(node: str, members: Group) -> frozenset[RankId]:
    topology = members.topology
    return frozenset(rank for rank, where in zip(topology.rank_ids, topology.nodes, strict=True) if node and where == node)


def _with(settings: Settings, ranks: frozenset[RankId]) -> Settings:
    return dataclasses.replace(settings, drained=tuple(sorted({*settings.drained, *ranks})))


def _without(settings: Settings, ranks: frozenset[RankId]) -> Settings:
    return dataclasses.replace(settings, drained=tuple(sorted({*settings.drained} - ranks)))
