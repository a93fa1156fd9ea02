"""What Prometheus sees of the planner. One registry for each planner, so that two in a process (tests) do not mix.

Gauges that follow a state are set by the deployment's own task, at least once a second; counters count from the start of
this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from eplb_service.drain import DrainState
from eplb_service.errors import EnvironmentFault
from eplb_service.flip_stall import ChunkFlip
from eplb_service.forecast import LAST
from eplb_service.forecast import NAMES as FORECASTS

SOLVE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STALL_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentGauges:
    """The state of a deployment in numbers. None = not known now: the series is dropped rather than kept stale."""

    imbalance_mean: float | None
    imbalance_worst: float | None
    window_coverage: float | None
    rollout_age_s: float
    rollout_stalled: bool
    ranks: Mapping[str, int]
    agents: int
    generation: int
    epoch: int
    leading: bool
    gain_share: float = 1.0
    seconds_per_token: float | None = None
    step_time_r_squared: float | None = None
    horizon_steps: float | None = None
    same_node_bytes_per_s: float | None = None
    cross_node_bytes_per_s: float | None = None
    commit_stall_s: float | None = None
    last_question_age_s: float | None = None
    engine_silent: bool | None = None
    drained_ranks: Mapping[str, int] = field(default_factory=dict)
    experts_alone_on_drained: int | None = None
    unreachable_experts: int = 0
    rolling_out: bool = False
    forecast_used: str = LAST
    forecast_less_off: Mapping[str, float] = field(default_factory=dict)


class Metrics:
    """Every metric of a planner."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        by = ["deployment"]
        self._imbalance = self._gauge(
            "eplb_imbalance",
            "Max rank load / mean rank load of the last closed windows under the live placement and the engine's dispatch;"
            " 1 is perfect. aggregate: mean_over_layers or worst_layer.",
            [*by, "aggregate"],
        )
        self._coverage = self._gauge("eplb_window_coverage", "Share of ranks and steps that the last windows hold, 0 to 1.", by)
        self._age = self._gauge("eplb_rollout_age_seconds", "Age of the rollout under way; 0 when there is none.", by)
        self._rolling = self._gauge(
            "eplb_rolling_out", "1 while a generation is on its way to the ranks (to an engine: told, and not shown yet).", by
        )
        self._stalled = self._gauge("eplb_rollout_stalled", "1 when a rollout made no progress within its deadline.", by)
        self._ranks = self._gauge("eplb_ranks", "Ranks by state: live, away or gone.", [*by, "state"])
        self._unreachable = self._gauge(
            "eplb_unreachable_experts", "Experts, over all layers, that live on no rank; must be 0.", by
        )
        self._drained = self._gauge(
            "eplb_drained_ranks", "Drained ranks by state: draining, safe_to_stop, absent or unknown.", [*by, "state"]
        )
        self._alone = self._gauge(
            "eplb_drained_experts_alone",
            "Experts, over all layers, that no rank that stays has: on the drained rank with the most of them.",
            by,
        )
        self._agents = self._gauge("eplb_agents", "Agent processes with an open control stream.", by)
        self._generation = self._gauge("eplb_generation", "Highest generation that is live on any layer; 0 = as loaded.", by)
        self._epoch = self._gauge("eplb_epoch", "Fencing number that this planner leads the deployment with.", by)
        self._leading = self._gauge("eplb_leading", "1 while this planner leads the deployment.", by)
        self._store_up = self._gauge("eplb_store_up", "1 when the store answered the last time it was asked.", [])
        self._verdicts = self._counter("eplb_verdicts", "Answers of the gate by code.", [*by, "code"])
        self._windows = self._counter("eplb_window_reports", "Load reports by outcome: accepted, or why not.", [*by, "outcome"])
        self._generations = self._counter(
            "eplb_generations", "Generations by how they ended: active or stopped.", [*by, "outcome"]
        )
        self._chunks = self._counter("eplb_chunks", "Chunks by how they ended: flipped or aborted.", [*by, "outcome"])
        self._share = self._gauge(
            "eplb_gain_share", "Share of a promised gain that is believed to come true: 1 minus the bias that was learned.", by
        )
        self._token_s = self._gauge(
            "eplb_step_seconds_per_token", "Step time for one token more on the busiest ranks, as measured.", by
        )
        self._r_squared = self._gauge(
            "eplb_step_time_r_squared", "Share of the variance of step times that the load of the busiest ranks explains.", by
        )
        self._horizon = self._gauge("eplb_horizon_steps", "Steps that a gain is worth, from how past plans went stale.", by)
        self._link_rate = self._gauge(
            "eplb_link_bytes_per_second",
            "Rate at which a rank (across nodes: a NIC) receives weights, as measured.",
            [*by, "link"],
        )
        self._stall = self._gauge("eplb_commit_stall_seconds", "Mean time that a chunk's flip held up steps.", by)
        self._chunk_stall = self._gauge(
            "eplb_chunk_stall_seconds",
            "Time that the flip of the last chunk held up steps. kind: measured on the slowest rank, or expected before.",
            [*by, "kind"],
        )
        self._forecast = self._gauge(
            "eplb_forecast_used", "1 for what plans are made for: the `last` windows, or a forecaster.", [*by, "forecaster"]
        )
        self._less_off = self._gauge(
            "eplb_forecast_less_off",
            "By how much a forecaster is less off than the last windows, as a share of that, over its backtests.",
            [*by, "forecaster"],
        )
        self._gain = self._gauge(
            "eplb_generation_gain",
            "Fall of imbalance (mean over layers by load) of the generation judged last: promised by the gate, and observed"
            " against what the previous placement would have shown on the same windows.",
            [*by, "kind"],
        )
        self._validated = self._counter(
            "eplb_generations_validated", "Generations judged after their commit: kept, smaller or worse.", [*by, "outcome"]
        )
        self._rolled_back = self._counter(
            "eplb_generations_rolled_back", "Generations rolled back by the planner because they made things worse.", by
        )
        self._questions = self._counter(
            "eplb_questions",
            "Questions of engines that move their own weights, by answer: move, keep or refused.",
            [*by, "answer"],
        )
        self._question_age = self._gauge(
            "eplb_last_question_age_seconds", "Time since the engine of an advised deployment asked last.", by
        )
        self._silent = self._gauge(
            "eplb_engine_silent",
            "1 while the engine of an advised deployment has not asked for several of its intervals; `eplb status` says more.",
            by,
        )
        self._moved_experts = self._counter("eplb_moved_experts", "Residencies moved by generations that became active.", by)
        self._moved_bytes = self._counter("eplb_moved_bytes", "Bytes that arrived at ranks, by kind of link.", [*by, "link"])
        self._solve_s = Histogram(
            "eplb_solve_seconds",
            "Time from asking the solver process to its verified answer.",
            [*by, "policy"],
            registry=self.registry,
            buckets=SOLVE_BUCKETS_S,
        )
        self._stall_s = Histogram(
            "eplb_flip_stall_seconds",
            "Time that a flip held up a step, by rank report.",
            by,
            registry=self.registry,
            buckets=STALL_BUCKETS_S,
        )
        Info("eplb_planner", "The planner's version.", registry=self.registry).info({"version": version})

    def store_answered(self, ok: bool) -> None:  # noqa: FBT001  # the one thing that it says
        """Whether the store answered."""
        self._store_up.set(1.0 if ok else 0.0)

    def state_changed(self, deployment: str, gauges: DeploymentGauges) -> None:
        """Set all gauges of a deployment."""
        for aggregate, value in (("mean_over_layers", gauges.imbalance_mean), ("worst_layer", gauges.imbalance_worst)):
            self._set_or_drop(self._imbalance, (deployment, aggregate), value)
        self._set_or_drop(self._coverage, (deployment,), gauges.window_coverage)
        self._age.labels(deployment).set(gauges.rollout_age_s)
        self._rolling.labels(deployment).set(float(gauges.rolling_out))
        self._stalled.labels(deployment).set(float(gauges.rollout_stalled))
        for state in ("live", "away", "gone"):
            self._ranks.labels(deployment, state).set(gauges.ranks.get(state, 0))
        self._unreachable.labels(deployment).set(gauges.unreachable_experts)
        for state in DrainState:
            self._drained.labels(deployment, state.value).set(gauges.drained_ranks.get(state.value, 0))
        self._set_or_drop(self._alone, (deployment,), gauges.experts_alone_on_drained)
        self._agents.labels(deployment).set(gauges.agents)
        self._generation.labels(deployment).set(gauges.generation)
        self._epoch.labels(deployment).set(gauges.epoch)
        self._leading.labels(deployment).set(float(gauges.leading))
        self._share.labels(deployment).set(gauges.gain_share)
        self._set_or_drop(self._token_s, (deployment,), gauges.seconds_per_token)
        self._set_or_drop(self._r_squared, (deployment,), gauges.step_time_r_squared)
        self._set_or_drop(self._horizon, (deployment,), gauges.horizon_steps)
        self._set_or_drop(self._stall, (deployment,), gauges.commit_stall_s)
        self._set_or_drop(self._question_age, (deployment,), gauges.last_question_age_s)
        self._set_or_drop(self._silent, (deployment,), None if gauges.engine_silent is None else float(gauges.engine_silent))
        for link, rate in (("same_node", gauges.same_node_bytes_per_s), ("cross_node", gauges.cross_node_bytes_per_s)):
            self._set_or_drop(self._link_rate, (deployment, link), rate)
        for name in FORECASTS:
            self._forecast.labels(deployment, name).set(float(name == gauges.forecast_used))
            self._set_or_drop(self._less_off, (deployment, name), gauges.forecast_less_off.get(name))

    def verdict_given(self, deployment: str, code: str) -> None:
        """The gate answered."""
        self._verdicts.labels(deployment, code).inc()

    def question_answered(self, deployment: str, answer: str) -> None:
        """A question of an advised deployment's engine was answered: move, keep or refused."""
        self._questions.labels(deployment, answer).inc()

    def report_answered(self, deployment: str, outcome: str) -> None:
        """A load report was taken or refused."""
        self._windows.labels(deployment, outcome).inc()

    def generation_ended(self, deployment: str, outcome: str, moved_experts: int) -> None:
        """A rollout ended: `active` or `stopped`."""
        self._generations.labels(deployment, outcome).inc()
        if outcome == "active":
            self._moved_experts.labels(deployment).inc(moved_experts)

    def generation_validated(self, deployment: str, outcome: str, *, promised_gain: float | None, observed_gain: float) -> None:
        """A generation was judged; promised_gain: None when the gate did not choose it."""
        self._validated.labels(deployment, outcome).inc()
        self._set_or_drop(self._gain, (deployment, "promised"), promised_gain)
        self._gain.labels(deployment, "observed").set(observed_gain)

    def rolled_back(self, deployment: str) -> None:
        """The planner rolled a generation back."""
        self._rolled_back.labels(deployment).inc()

    def chunk_ended(self, deployment: str, outcome: str) -> None:
        """A chunk ended: `flipped` or `aborted`."""
        self._chunks.labels(deployment, outcome).inc()

    def bytes_received(self, deployment: str, bytes_by_link: Mapping[str, int]) -> None:
        """Weights arrived at a rank's staging."""
        for link, count in bytes_by_link.items():
            self._moved_bytes.labels(deployment, link).inc(count)

    def flip_stalled(self, deployment: str, seconds: float) -> None:
        """A rank flipped."""
        self._stall_s.labels(deployment).observe(seconds)

    def chunk_stalled(self, deployment: str, flip: ChunkFlip) -> None:
        """A chunk flipped on all ranks."""
        self._chunk_stall.labels(deployment, "expected").set(flip.expected_s)
        self._chunk_stall.labels(deployment, "measured").set(flip.measured_s)

    def solved(self, deployment: str, policy: str, seconds: float) -> None:
        """A plan was made."""
        self._solve_s.labels(deployment, policy).observe(seconds)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _set_or_drop(self, gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
        if value is not None:
            gauge.labels(*labels).set(value)
        else:
            gauge.remove(*labels)


class MetricsServer:
    """Serves /metrics from a thread of its own, so that a scrape never waits for the planner nor the planner for it."""

    def __init__(self, metrics: Metrics, *, host: str, port: int) -> None:
        self._metrics = metrics
        self._host, self._port = host, port
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    def start(self) -> int:
        """Serve; returns the port. Raises EnvironmentFault when it cannot be had."""
        try:
            self._server, self._thread = start_http_server(self._port, self._host, self._metrics.registry)
        except (OSError, OverflowError) as error:
            raise EnvironmentFault(
                f"/metrics cannot be served on {self._host}:{self._port}: {getattr(error, 'strerror', None) or error};"
                " free the port, or choose another with --metrics-port (0 picks one)"
            ) from None
        return int(self._server.server_port)

    def stop(self) -> None:
        """Stop serving; idempotent."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(timeout=2.0)
