"""The adviser of one engine process: asks with its peers, counts, says what changed. Never raises."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed

from agent.adviser import client
from agent.adviser.agree import Group, GroupFacts, agree
from agent.adviser.call import Call, Decision, Outcome, each_token_once
from agent.adviser.config import AdviserConfig
from agent.adviser.engine_copy import Carrying, CopyWatch, EngineCopy
from agent.adviser.models import Models
from agent.adviser.presence import TRIES, all_present, shared_store
from agent.transfer.gloo import first_line
from eplb_service import __version__
from eplb_service.advice import Advice, AdviceRequest, map_digest
from eplb_service.errors import EplbError
from eplb_service.ids import DeploymentId, GenerationNumber

_dist: Any = torch.distributed
AskAgent = Callable[..., Advice]


class Adviser:
    """One for each engine process. Not for use by two threads at once: engines run their policy on one.

    logger: the engine's own, so that what is said shows where its operators look.
    """

    def __init__(self, config: AdviserConfig, logger: logging.Logger, *, ask: AskAgent = client.ask) -> None:
        self.config, self._logger, self._ask_agent = config, logger, ask
        self.counts: Counter[Outcome] = Counter()
        """Calls by what they led to."""
        self.models = Models(most=1)
        self._copies = CopyWatch()
        self._origin = secrets.randbits(62) + 1
        self._sequence = 0
        self._group: weakref.ref[Any] | None = None
        self._calls_of_group = 0
        self._tries = 0
        self._absent = ""
        self._present = False
        self._said: dict[str, tuple[Outcome, str]] = {}
        """What was said last of each deployment: a reason that repeats is not said again."""

    def advise(self, group: Group, build: Callable[[], Call], carrying: Callable[[], Carrying]) -> Decision:
        """What the engine is to do, the same on all ranks of the group, all of which are in this call.

        build: makes the call of what the engine gave; what it raises is this rank's word that it failed. carrying: how to see
        that the engine carries the answer out. An outcome of ENGINE says that the ranks are not all in this, and the engine's
        own policy has to answer.
        """
        if not self._all_present(group):
            return self._said_and_counted(Decision(outcome=Outcome.ENGINE, reason=self._absent), group)
        call: Call | None = None
        problem = ""
        try:
            call = build()
        except EplbError as error:
            problem = str(error)
        except Exception as error:
            self._logger.exception("adviser: this rank cannot make sense of what the engine gave")
            problem = f"this rank cannot make sense of what the engine gave: {first_line(error)}"
        self._calls_of_group += 1
        made = call
        decision = agree(group, call, problem=problem, number=self._calls_of_group, ask=lambda facts: self._ask(made, facts))
        if made is not None and decision.rows is not None and group.rank() == 0:
            self._copies.begin(made.deployment, decision.generation, carrying())
        return self._said_and_counted(decision, group, made.deployment if made is not None else "")

    def left_to_engine(self, group: Group | None, reason: str) -> None:
        """The engine's own policy answers this call: count it, and say why."""
        self._said_and_counted(Decision(outcome=Outcome.ENGINE, reason=reason), group)

    def broke(self, error: Exception) -> None:
        """Something that cannot be went wrong in the adviser itself, and the engine stays as it is."""
        self._logger.error("adviser: a fault of its own", exc_info=error)
        self._said_and_counted(Decision(outcome=Outcome.FAILED, reason=f"a fault of the adviser: {first_line(error)}"), None)

    def _ask(self, call: Call | None, facts: GroupFacts) -> Advice:
        if call is None:
            raise RuntimeError("asked without a call")  # agree() asks only when every rank has one
        self._sequence += 1
        return self._ask_agent(
            self.config.socket_path,
            _question(call, facts, self._origin, self._sequence, self.config.timeout_s, self._copies.last(call.deployment)),
            timeout_s=self.config.timeout_s,
            release=__version__,
        )

    def _all_present(self, group: Group) -> bool:
        """Whether all ranks of the group run the adviser; a new group is asked anew."""
        if self._group is None or self._group() is not group:
            self._group = weakref.ref(group)
            self._calls_of_group, self._present, self._tries = 0, False, 0
        if self._present or self._tries >= TRIES:
            return self._present
        self._tries += 1
        store, name = shared_store(), _name_of(group)
        self._absent = ""
        if store is not None and name:
            self._absent = all_present(
                store,
                name,
                attempt=self._tries,
                rank=group.rank(),
                size=group.size(),
                timeout_s=self.config.timeout_s,
            )
        self._present = not self._absent
        return self._present

    def _said_and_counted(self, decision: Decision, group: Group | None, about: str = "") -> Decision:
        self.counts[decision.outcome] += 1
        said = (decision.outcome, decision.reason)
        if said == self._said.get(about):
            return decision
        self._said[about] = said
        level = logging.INFO if decision.outcome in _FINE else logging.WARNING
        if decision.outcome in _OWN or group is None or group.rank() == 0:
            what = f"{decision.outcome} to generation {decision.generation}" if decision.rows is not None else decision.outcome
            self._logger.log(
                level, "adviser: %s%s: %s (so far: %s)", what, f" ({about})" if about else "", decision.reason, self.tally()
            )
        return decision

    def tally(self) -> str:
        """What all calls so far led to, for people."""
        return ", ".join(f"{outcome} {self.counts[outcome]}" for outcome in Outcome if self.counts[outcome])


_FINE = (Outcome.MOVED, Outcome.KEPT, Outcome.IDLE)
_OWN = (Outcome.FAILED, Outcome.DISAGREED, Outcome.GROUP)
"""Here each rank may have a reason of its own; the rest is said by rank 0 for all."""


def _name_of(group: Group) -> str:
    """A name of the group that its ranks share and no other group has; empty for one that is of no world (elastic engines)."""
    try:
        ranks = _dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return ""
    return f"{min(ranks)}-{max(ranks)}-{len(ranks)}"


def _question(
    call: Call, facts: GroupFacts, origin: int, sequence: int, timeout_s: float, copied: EngineCopy | None
) -> AdviceRequest:
    return AdviceRequest(
        deployment=DeploymentId(call.deployment),
        engine=call.engine,
        origin=origin,
        sequence=sequence,
        model=call.model,
        layer_ids=call.layer_ids,
        rank_ids=facts.rank_ids,
        nodes=facts.nodes,
        num_logical=call.num_logical,
        dispatch=call.dispatch,
        num_groups=facts.num_groups,
        load=each_token_once(call.load, call.num_ranks),
        current=call.current,
        digest=map_digest(call.current),
        expert_bytes=call.expert_bytes,
        steps=call.steps,
        timeout_s=timeout_s,
        copied_generation=GenerationNumber(copied.generation if copied is not None else 0),
        copied_s=copied.seconds if copied is not None else 0.0,
        copy_held_steps=copied is not None and copied.held_steps,
    )
