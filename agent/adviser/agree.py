"""All ranks of a group do what one of them was told, or all stay as they are.

Every collective is an all-reduce: the one operation that engines use on these groups themselves, and one without ranks that
would have to be translated (vllm-ascend#10486). Whatever goes wrong on a rank, it takes part in all of them and says that it
failed:

    1. sum   a table, a row for each rank      all compare map, shape, release and call; the same table on all
    2. sum   the answer's header, of rank 0    verdict, generation, digest, sentence
    3. sum   the map, of rank 0                only when the header says move: the same on all
    4. min   (fine, digest, -digest)           only then, too: all checked it, all have the same

Which of them are run follows from numbers that are the same on all ranks, so no rank is in another one than its peers. A group
that breaks is beyond that: an all-reduce raises on some ranks and ends at the group's own time-out on others, all stay on their
map, and the engine's own collectives on that group fail as they would without us.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from agent.adviser import rank_table
from agent.adviser.answer_check import EngineRules, check_answer, check_rows
from agent.adviser.call import Call, Decision, Int32Array, Outcome
from agent.adviser.client import NoAnswerError
from agent.transfer.gloo import first_line
from eplb_service import __version__
from eplb_service.advice import Advice, map_digest

logger = logging.getLogger(__name__)

SENTENCE_BYTES_MAX = 512
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_dist: Any = torch.distributed


class Group(Protocol):
    """What is needed of a process group (torch's has it)."""

    def rank(self) -> int:
        """Own position."""
        ...

    def size(self) -> int:
        """Number of ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The ranks of a group as rank 0 tells the planner; see `AdviceRequest`."""

    rank_ids: tuple[int, ...]
    nodes: tuple[str, ...]
    num_groups: int


Ask = Callable[[GroupFacts], Advice]
"""Asks the planner; called on rank 0 only. Raises NoAnswerError."""


class _Verdict(IntEnum):
    MOVE = 1
    KEEP = 2
    AWAY = 3
    REFUSED = 4
    FAILED = 5


_OUTCOME = {
    _Verdict.KEEP: Outcome.KEPT,
    _Verdict.AWAY: Outcome.AWAY,
    _Verdict.REFUSED: Outcome.REFUSED,
    _Verdict.FAILED: Outcome.FAILED,
}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 tells the others."""

    verdict: _Verdict
    reason: str
    generation: int = -1
    digest: int = 0
    rows: Int32Array | None = None


def agree(group: Group, call: Call | None, *, problem: str, number: int, ask: Ask) -> Decision:
    """What all ranks do. Called by all ranks of the group at once; never raises.

    call: None on a rank that could not make sense of what the engine gave it; problem says why. number: of this call on this
    group. Blocks for as long as `ask` does, and for as long as the slowest rank takes to come.
    """
    try:
        return _agree(group, call, problem, number, ask)
    except Exception as error:  # noqa: BLE001  (the engine's thread must not die of it)
        return Decision(outcome=Outcome.GROUP, reason=f"the ranks could not talk to one another: {first_line(error)}")


def _agree(group: Group, call: Call | None, problem: str, number: int, ask: Ask) -> Decision:
    row, problem = _own_row(call, problem, number)
    table = torch.zeros((group.size(), rank_table.WIDTH), dtype=torch.int64, device="cpu")
    table[group.rank()] = torch.from_numpy(row)
    rows_of_ranks: npt.NDArray[np.int64] = _reduced(group, table).numpy()
    failed = rank_table.failed_ranks(rows_of_ranks)
    if failed or call is None:
        return Decision(outcome=Outcome.FAILED, reason=problem or f"rank {rank_table.shown(failed)} failed; its log says why")
    if rank_table.is_resizing(rows_of_ranks):
        return Decision(outcome=Outcome.ENGINE, reason=call.resizing or "the map of another rank has empty slots")
    different = rank_table.difference(rows_of_ranks)
    if different:
        return Decision(outcome=Outcome.DISAGREED, reason=different)
    if rank_table.is_idle(rows_of_ranks):
        return Decision(outcome=Outcome.IDLE, reason="nothing was routed since the last call")
    rules = rank_table.rules_of(rows_of_ranks, call)
    own = _asked(call, rules, rows_of_ranks, ask) if group.rank() == 0 else None
    answer = _unpacked(_reduced(group, _packed(own)))
    if answer.verdict is not _Verdict.MOVE:
        return Decision(outcome=_OUTCOME[answer.verdict], reason=answer.reason, generation=answer.generation)
    return _moved(group, call, rules, answer, own.rows if own is not None else None)


def _own_row(call: Call | None, problem: str, number: int) -> tuple[npt.NDArray[np.int64], str]:
    try:
        if call is None:
            return rank_table.failed_row(), problem
        name = socket.gethostname()
        return rank_table.row_of(
            call, number=number, rank_id=_global_rank(), node=_boot_id() or name, name=name, release=__version__
        ), ""
    except Exception as error:  # noqa: BLE001  (must take part in what follows)
        return rank_table.failed_row(), f"the map of this rank cannot be compared: {first_line(error)}"


def _global_rank() -> int:
    return int(_dist.get_rank()) if _dist.is_initialized() else -1


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _asked(call: Call, rules: EngineRules, table: npt.NDArray[np.int64], ask: Ask) -> _Answer:
    """On rank 0: the planner's answer, or why there is none. Never raises."""
    try:
        facts = GroupFacts(rank_ids=rank_table.rank_ids(table), nodes=rules.nodes, num_groups=rules.num_groups)
        advice = ask(facts)
        unusable = check_answer(advice, call.current, rules)
        if unusable:
            return _Answer(_Verdict.REFUSED, f"the planner's answer cannot be used: {unusable}")
        reason = " ".join(advice.reason.split())  # one line of the engine's log
        if not advice.move or advice.rows is None:
            return _Answer(_Verdict.KEEP, reason, advice.generation, advice.digest)
        return _Answer(_Verdict.MOVE, reason, advice.generation, advice.digest, advice.rows)
    except NoAnswerError as error:
        return _Answer(_Verdict.AWAY, str(error))
    except Exception as error:
        logger.exception("adviser.failed")
        return _Answer(_Verdict.FAILED, f"asking the planner failed: {first_line(error)}")


_NUMBERS = 3


def _packed(answer: _Answer | None) -> torch.Tensor:
    """The answer's header, zeros on ranks that did not ask. Shape (3 + SENTENCE_BYTES_MAX / 8,), int64."""
    header = np.zeros(_NUMBERS + SENTENCE_BYTES_MAX // 8, dtype=np.int64)
    if answer is not None:
        header[:_NUMBERS] = answer.verdict, answer.generation, answer.digest
        sentence = answer.reason.encode(errors="replace")[:SENTENCE_BYTES_MAX].ljust(SENTENCE_BYTES_MAX, b"\0")
        header[_NUMBERS:] = np.frombuffer(sentence, "<i8")
    return torch.from_numpy(header)


def _unpacked(header: torch.Tensor) -> _Answer:
    numbers = header.numpy()
    sentence = numbers[_NUMBERS:].astype("<i8").tobytes().rstrip(b"\0").decode(errors="replace")
    return _Answer(_Verdict(int(numbers[0])), sentence, int(numbers[1]), int(numbers[2]))


def _moved(group: Group, call: Call, rules: EngineRules, answer: _Answer, asked: Int32Array | None) -> Decision:
    """Steps 3 and 4: the map to all, checked by all."""
    sent = torch.zeros(call.current.shape, dtype=torch.int32, device="cpu")
    if asked is not None:
        sent.copy_(torch.from_numpy(np.array(asked)))
    rows: Int32Array = _reduced(group, sent).numpy()
    problem, digest = _checked(call, rules, answer, rows)
    verdict = torch.tensor([int(not problem), digest, -digest], dtype=torch.int64, device="cpu")
    fine, least, most = _reduced(group, verdict, least=True).tolist()
    if not fine or least != -most:
        return Decision(
            outcome=Outcome.DISAGREED, reason=problem or "another rank got another map, or could not use it; its log says why"
        )
    return Decision(outcome=Outcome.MOVED, reason=answer.reason, generation=answer.generation, rows=rows)


def _checked(call: Call, rules: EngineRules, answer: _Answer, rows: Int32Array) -> tuple[str, int]:
    """Why the map as it came here cannot be used (empty = it can), and its digest. Never raises."""
    try:
        digest = map_digest(rows)
        if digest != answer.digest:
            return f"the map came with digest {digest:#x}; it was sent with {answer.digest:#x}", digest
        return check_rows(rows, call.current, rules), digest
    except Exception as error:  # noqa: BLE001  (must take part in what follows)
        return f"checking the map failed: {first_line(error)}", 0


def _reduced(group: Group, tensor: torch.Tensor, *, least: bool = False) -> torch.Tensor:
    """The same numbers on all ranks: their sum, or the least of each. In place."""
    _dist.all_reduce(tensor, op=_dist.ReduceOp.MIN if least else _dist.ReduceOp.SUM, group=group)
    return tensor
