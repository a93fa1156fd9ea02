"""What the planner said in the course of a run: windows, generations and when each went live."""

from __future__ import annotations

from typing import Any

from demo.observer import Seen
from demo.result import GenerationRow, Phase, Sample, phase_of, relative_loads
from demo.screen import RankRow, Screen
from eplb_service.cli.generations import state_text
from eplb_service.rpc.arrays import array_from_pb

LIVE_STATES = {"active", "superseded"}


class Chronicle:
    """Turns what the planner says into samples, generation rows and lines on the screen."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._states: dict[int, str] = {}
        self.live_at: dict[int, float] = {}
        self.samples: list[Sample] = []
        self.generations: list[Any] = []

    def note(self, now: float, seen: Seen, *, running: list[int]) -> None:
        """Take in what the planner said last; seconds since the start of serving."""
        self._screen.view.planner = "does not answer (serving goes on)" if seen.away else "answers"
        if seen.deployment is None:
            return
        self.generations = seen.generations
        self._note_generations(now)
        self._note_window(now, seen.deployment)
        self._show(seen.deployment, running)

    def rows(self, phases: list[Phase]) -> list[GenerationRow]:
        """Every generation that went live, as the planner recorded it."""
        return [self._row(view, phases) for view in self.generations if view.generation in self.live_at]

    def _row(self, view: Any, phases: list[Phase]) -> GenerationRow:
        at = self.live_at[view.generation]
        observed = view.observed if view.HasField("observed") else None
        return GenerationRow(
            generation=view.generation,
            phase=phase_of(phases, at),
            reason=view.reason,
            seconds=at,
            predicted_mean=view.predicted.mean_over_layers,
            predicted_worst=view.predicted.worst_layer,
            observed_mean=observed.mean_over_layers if observed else None,
            observed_worst=observed.worst_layer if observed else None,
            moves=view.moves.experts,
            bytes_moved=view.moves.bytes.same_node + view.moves.bytes.cross_node,
            rollout_s=view.rollout_s,
            flip_boundaries=tuple(view.flip_boundaries),
            state=state_text(view.state),
            by_operator=view.policy == "rollback" or "forced by an operator" in view.reason,
        )

    def _note_generations(self, now: float) -> None:
        for view in self.generations:
            state = state_text(view.state)
            if self._states.get(view.generation) == state:
                continue
            self._states[view.generation] = state
            if state in LIVE_STATES and view.generation not in self.live_at:
                self.live_at[view.generation] = now
                steps = ", ".join(str(step) for step in view.flip_boundaries)
                self._screen.event(f"generation {view.generation} is live: every rank flipped at step {steps}")
            elif state == "stopped":
                self._screen.event(f"generation {view.generation} stopped: {view.stop_reason}")
            elif state not in LIVE_STATES:
                self._screen.event(f"generation {view.generation} {state}: {view.reason}")

    def _note_window(self, now: float, status: Any) -> None:
        if not status.HasField("imbalance") or (self.samples and self.samples[-1].window_index >= status.window_index):
            return
        imbalance = status.imbalance
        mean, worst = imbalance.mean_over_layers, imbalance.worst_layer
        self.samples.append(Sample(now, status.window_index, status.live_generation, mean, worst))
        self._screen.view.worst_history.append(worst)

    def _show(self, status: Any, running: list[int]) -> None:
        view, rollout = self._screen.view, status.rollout
        view.generation = status.live_generation
        view.rollout = ""
        if rollout.state:
            progress = f"{rollout.chunks_done} of {rollout.chunks_total} chunks"
            view.rollout = f"generation {rollout.generation}: {rollout.state}, {progress}"
        if status.HasField("last_verdict"):
            view.verdict = status.last_verdict.reason
        view.layers = [str(layer.layer_id) for layer in status.layers]
        view.per_layer = list(status.imbalance.per_layer)
        loads = None
        if status.HasField("rank_loads"):
            loads = relative_loads(array_from_pb(status.rank_loads, "rank_loads", dtypes="f", shape=("layers", "ranks")))
        view.ranks = [
            RankRow(
                rank_id=rank.address.rank_id,
                state=rank.state,
                step=rank.boundary,
                chunk=rank.chunk_state,
                loads=[] if loads is None else loads[:, index].tolist(),
                running=running[index] if index < len(running) else 0,
            )
            for index, rank in enumerate(status.ranks)
        ]
