"""The planner's configuration: every setting with its default, unit and meaning.

What changes at run time (mode, pause, policy) starts from here and then lives in the store, which wins; `eplb status`
shows what is in effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from eplb_service.control import PLANNER_PORT, Throttle
from eplb_service.costs import GivenCosts
from eplb_service.errors import InvalidInputError
from eplb_service.forecast import Kind
from eplb_service.gate import GateConfig
from eplb_service.policy.base import Constraints, Effort, ExpertOnRank, FailureDomain, Resilience
from eplb_service.policy.magnitudes import EXPERT_BYTES_MAX
from eplb_service.rollout.events import RolloutSettings
from eplb_service.settings import Value, build, resolve, setting, settings_of
from eplb_service.store.address import parse_address
from eplb_service.validation import ValidationConfig

DEFAULT_METRICS_PORT = 7471
MODES = ("observe", "auto", "pinned")
EMBEDDED = "embedded"
FORECASTS = ("auto", "off", *Kind)
BYTES_PER_S_MIN = 1e6
"""Slower than this a chunk would be under way for so long that nothing is ever balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where gRPC is served."""

    host: str = setting("127.0.0.1", "address that gRPC is served on; 0.0.0.0 for all")
    port: int = setting(PLANNER_PORT, "port that gRPC is served on; 0 picks a free one", low=0, high=65535)
    tls_cert: str | None = setting(None, "PEM file of the planner's certificate chain; with tls_key turns TLS on", kind=str)
    tls_key: str | None = setting(None, "PEM file of the key of tls_cert", kind=str)
    tls_client_ca: str | None = setting(None, "PEM file: only clients whose certificate it signed may call", kind=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where Prometheus finds /metrics."""

    enabled: bool = setting(default=True, help="serve /metrics")
    host: str = setting("127.0.0.1", "address that /metrics is served on; 0.0.0.0 for all")
    port: int = setting(DEFAULT_METRICS_PORT, "port that /metrics is served on; 0 picks a free one", low=0, high=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where the planner remembers."""

    address: str = setting(EMBEDDED, "`embedded` (a server of our own in data_dir), redis://…, rediss://… or unix://…")
    data_dir: str = setting("eplb-data", "directory of the embedded store")
    password: str | None = setting(None, "password of the store; wins over one in the address", kind=str, secret=True)
    owner: str | None = setting(
        None, "name of this planner; one that restarts with the same name need not wait for its lease", kind=str
    )
    lease_s: float = setting(10.0, "how long a planner leads without a sign of life", unit="s", low=1.0, high=3600.0)


def _residencies(text: str | None) -> frozenset[ExpertOnRank]:
    """Of a list with commas. Raises InvalidInputError for what is none."""
    return frozenset(ExpertOnRank.parse(part.strip()) for part in (text or "").split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningConfig:
    """When and how plans are made."""

    mode: str = setting(
        "observe", "mode of a new deployment: plan and show only, publish too, or keep what is live", choices=MODES
    )
    policy: str = setting("minmove", "policy of a new deployment")
    interval_s: float = setting(10.0, "least time between two plans of a deployment", unit="s", low=0.0, high=86_400.0)
    windows: int = setting(4, "closed windows that a plan is made from", unit="windows", low=1, high=1024)
    windows_kept: int = setting(64, "windows kept in memory for each deployment", unit="windows", low=1, high=4096)
    windows_bytes: int = setting(256 << 20, "most memory of kept windows for each deployment", unit="bytes", low=1 << 20)
    seed: int = setting(0, "seed of policies that draw random numbers", low=0, high=(1 << 31) - 1)
    effort: str = setting("normal", "how long a policy searches: about 1, 5 or 30 s on one core", choices=tuple(Effort))
    max_imbalance: float | None = setting(
        None, "target: every layer at or under this with the fewest moves; the policy's own if not given", kind=float, low=1.0
    )
    front: bool = setting(default=True, help="ask for the whole front of balance against moves, so that the gate can choose")
    certify: bool = setting(default=False, help="spend time on lower bounds too")
    sources: bool = setting(default=True, help="plan with where tokens come from, where the engine dispatches to the nearest")
    proposal_ttl_s: float = setting(60.0, "a proposal older than this is not published any more", unit="s", above=0.0)
    max_moves: int | None = setting(None, "most experts that a plan moves", kind=int, low=0)
    max_moves_per_rank: int | None = setting(None, "most experts that one rank takes in, over all layers", kind=int, low=0)
    max_moves_per_layer: int | None = setting(None, "most experts that a plan moves in one layer", kind=int, low=0)
    max_move_bytes: int | None = setting(None, "most bytes that a plan moves", kind=int, unit="bytes", low=0)
    max_layers: int | None = setting(None, "most layers that a plan changes", kind=int, low=0)
    num_groups: int | None = setting(None, "expert groups that share a node", kind=int, low=1)
    expert_bytes: int | None = setting(
        None,
        "bytes of one expert, where an engine that is advised does not say",
        kind=int,
        unit="bytes",
        low=1,
        high=EXPERT_BYTES_MAX,
    )
    group_price: float | None = setting(
        None, "price of a replica off its group's node, in moves; groups are strict if not given", kind=float, low=0.0
    )
    resilient_share: float | None = setting(
        None, "share of the hottest experts that must outlive a lost rank or node", kind=float, above=0.0, high=1.0
    )
    resilient_domain: str = setting("node", "what they must outlive the loss of", choices=tuple(FailureDomain))
    pins: str | None = setting(None, "experts that must be on a rank: EXPERT@RANK or EXPERT@RANK/LAYER, …", kind=str)
    bars: str | None = setting(None, "experts that must not be on a rank, written alike", kind=str)
    forecast: str = setting(
        "auto", "forecasts of load that may be planned for, each only where backtests show that it wins", choices=FORECASTS
    )
    forecast_day_bins: int = setting(24, "bins of the day in which load is learned", unit="bins", low=2, high=288)

    def __post_init__(self) -> None:
        """Pins and bars are read when the planner starts, not with the first plan."""
        for name, text in (("pins", self.pins), ("bars", self.bars)):
            try:
                _residencies(text)
            except InvalidInputError as error:
                raise InvalidInputError(f"setting planning.{name}: {error}") from None

    def constraints(self, *, max_replicas: int) -> Constraints:
        """For `PlanningProblem`. max_replicas: width of the engine's replica table."""
        resilience = None
        if self.resilient_share is not None:
            resilience = Resilience(hot_share=self.resilient_share, domain=FailureDomain(self.resilient_domain))
        return Constraints(
            num_groups=self.num_groups,
            group_price=self.group_price,
            resilience=resilience,
            pinned=_residencies(self.pins),
            barred=_residencies(self.bars),
            max_moves=self.max_moves,
            max_move_bytes=self.max_move_bytes,
            max_moves_per_rank=self.max_moves_per_rank,
            max_moves_per_layer=self.max_moves_per_layer,
            max_layers=self.max_layers,
            max_replicas=max_replicas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What a move must clear; see `gate.GateConfig`."""

    min_gain_mean: float = setting(0.01, "least fall of imbalance, mean over layers (or min_gain_worst)", low=0.0)
    min_gain_worst: float = setting(0.05, "least fall of imbalance, worst layer (or min_gain_mean)", low=0.0)
    min_generation_age_s: float = setting(60.0, "least age of the live generation before the next", unit="s", low=0.0)
    min_coverage: float = setting(0.9, "least share of ranks and steps that a window must hold", low=0.0, high=1.0)
    min_tokens: int = setting(1000, "least token assignments for each layer in the windows", unit="tokens", low=0)
    min_sub_windows: int = setting(4, "least sub-windows that a plan is made from", unit="sub-windows", low=1)
    min_busy_layers: float = setting(0.5, "least share of the layers that must have counted tokens", low=0.0, high=1.0)
    noise_sigmas: float = setting(3.0, "standard errors of sampling noise that the gain must stand clear of", low=0.0)
    min_return: float = setting(1.25, "seconds that a move must save for each second that it costs", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """What imbalance and moves cost; what is not given is measured (see `costs`)."""

    seconds_per_step: float | None = setting(
        None, "time of a step spent where ranks wait for the busiest, at imbalance 1", kind=float, unit="s", above=0.0
    )
    horizon_steps: int | None = setting(None, "steps that a gain is worth", kind=int, unit="steps", low=1)
    bytes_per_s: float | None = setting(None, "rate at which a rank receives weights", kind=float, unit="bytes/s", above=0.0)
    cross_node_bytes_per_s: float | None = setting(
        None, "rate of a NIC from other nodes; as bytes_per_s if only that is given", kind=float, unit="bytes/s", above=0.0
    )
    commit_stall_s: float | None = setting(None, "time that a chunk's flip stops every rank", kind=float, unit="s", low=0.0)
    copy_interference: float | None = setting(
        None, "share of serving time lost while weights are copied", kind=float, low=0.0, high=1.0
    )
    replica_s_per_gib: float = setting(0.0, "seconds that a GiB held by replicas is worth; 0: not priced", unit="s", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSettings:
    """What is looked at after a generation became live; see `validation.ValidationConfig`."""

    windows: int = setting(4, "full windows after which a generation is judged", unit="windows", low=1, high=1024)
    noise_sigmas: float = setting(3.0, "standard errors that a loss must stand clear of", low=0.0)
    min_loss: float = setting(0.01, "least loss of imbalance, mean over layers, that is rolled back", low=0.0)
    roll_back: bool = setting(default=True, help="roll a generation back that makes things worse (in mode auto)")
    changed_share: float = setting(
        0.1, "share of the tokens that must go elsewhere before anything is moved after such a rollback", low=0.0, high=1.0
    )
    hold_s: float = setting(21_600.0, "after so long such a rollback is forgotten", unit="s", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Deadlines of a rollout; see `rollout_events.RolloutSettings`."""

    hello_timeout_s: float = setting(10.0, "wait for a rank to say what is live, before it is asked again", unit="s", above=0.0)
    stage_timeout_s: float = setting(60.0, "longest time to copy a chunk's weights aside at full speed", unit="s", above=0.0)
    arm_ttl_s: float = setting(20.0, "how long a rank stays armed without a flip", unit="s", above=0.0)
    slowest_step_s: float = setting(1.0, "longest step of the engine that is still healthy", unit="s", above=0.0)
    disarm_timeout_s: float = setting(10.0, "wait for a chunk to be withdrawn, before it is asked again", unit="s", above=0.0)
    hold_timeout_s: float = setting(120.0, "how long a chunk waits for ranks that are away", unit="s", above=0.0)
    backoff_s: float = setting(1.0, "first pause after an aborted chunk; doubled each time", unit="s", above=0.0)
    backoff_max_s: float = setting(30.0, "longest pause after an aborted chunk", unit="s", above=0.0)
    tries_max: int = setting(4, "tries of a chunk before the generation is stopped", low=1, high=100)
    layers_per_chunk_max: int | None = setting(None, "most layers in a chunk; as staging allows if not given", kind=int, low=1)
    commit_stall_ms_max: float = setting(
        10.0, "longest that a flip may hold up steps: chunks are cut so, layers are not; 0: no limit", unit="ms", low=0.0
    )
    rank_silence_s: float = setting(
        10.0, "silence after which a rank is shown as away, and another fleet may take its place", unit="s", above=0.0
    )
    resume_age_s: float = setting(600.0, "a rollout begun longer ago is not resumed by a new leader", unit="s", low=0.0)

    def settings(self) -> RolloutSettings:
        """For `Rollout`."""
        return RolloutSettings(
            **{
                part.name: getattr(self, part.name)
                for part in fields(self)
                if part.name not in ("rank_silence_s", "resume_age_s")
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """How fast the weights of a rollout may travel; see `control.Throttle`. Deadlines of staging allow for it."""

    bytes_per_s: float = setting(0.0, "most bytes that a rank sends in a second; 0: no limit", unit="bytes/s", low=0.0)
    time_share: float = setting(1.0, "most of its time that a rank sends in", low=0.01, high=1.0)

    def __post_init__(self) -> None:
        if 0 < self.bytes_per_s < BYTES_PER_S_MIN:
            raise InvalidInputError(
                f"setting transfer.bytes_per_s is {self.bytes_per_s:g}: use at least {BYTES_PER_S_MIN:g} bytes/s (an expert of"
                " 44 MB then takes 44 s), or 0 for no limit"
            )

    def throttle(self) -> Throttle:
        """For every `Stage`."""
        return Throttle(bytes_per_s=self.bytes_per_s, time_share=self.time_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """Limits of the process that runs policies."""

    deadline_s: float = setting(30.0, "hard stop of one plan", unit="s", above=0.0, high=3600.0)
    memory_bytes: int = setting(2 << 30, "most memory of the solver process", unit="bytes", low=128 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Bounds on what others may make the planner hold."""

    message_bytes: int = setting(64 << 20, "largest gRPC message", unit="bytes", low=1 << 16, high=(1 << 31) - 1)
    deployments: int = setting(64, "most deployments of one planner", low=1, high=4096)
    ranks: int = setting(4096, "most ranks of a deployment", low=1, high=65_536)
    watchers: int = setting(256, "most open watch and control streams of a deployment", low=1, high=65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is logged, to stderr."""

    format: str = setting("console", "for people or for machines", choices=("console", "json"))
    level: str = setting("info", "least level that is logged", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything that `eplb serve` can be told.

    >>> ServeConfig().listen.port
    7470
    """

    listen: ListenConfig = field(default_factory=ListenConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    gate: GateSettings = field(default_factory=GateSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    solver: SolverSettings = field(default_factory=SolverSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    log: LogSettings = field(default_factory=LogSettings)

    def gate_config(self) -> GateConfig:
        """For `gate.decide`."""
        return GateConfig(**{part.name: getattr(self.gate, part.name) for part in fields(GateSettings)})

    def given_costs(self) -> GivenCosts:
        """For `costs.cost_model`."""
        given = {part.name: getattr(self.cost, part.name) for part in fields(CostSettings)}
        most_s = self.rollout_settings().commit_stall_s_max
        return GivenCosts(**given, throttle=self.transfer.throttle(), commit_stall_s_max=most_s)

    def rollout_settings(self) -> RolloutSettings:
        """For `Rollout`."""
        return replace(self.rollout.settings(), throttle=self.transfer.throttle())

    def validation_config(self) -> ValidationConfig:
        """For `validation.judge`."""
        return ValidationConfig(**{part.name: getattr(self.validation, part.name) for part in fields(ValidationSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration and where each value comes from (`flag`, `environment`, `file`, `default`), by key."""

    config: ServeConfig
    sources: Mapping[str, str]

    def given(self) -> dict[str, str]:
        """What somebody gave, as text by key; secrets are not shown."""
        return {key: text for key, text in shown(self.config).items() if self.sources[key] != "default"}


def shown(config: ServeConfig) -> dict[str, str]:
    """Every setting as text by key; secrets are not shown, nor a password in the store's address."""
    texts = {}
    for found in settings_of(ServeConfig):
        section, leaf = found.key.split(".")
        value: Value = getattr(getattr(config, section), leaf)
        if found.key == "store.address" and value != EMBEDDED:
            value = str(parse_address(str(value)))
        texts[found.key] = "***" if found.secret and value is not None else str(value)
    return texts


def changed(config: ServeConfig) -> dict[str, str]:
    """Settings that are not at their default, as `shown` has them."""
    defaults = shown(ServeConfig())
    return {key: text for key, text in shown(config).items() if text != defaults[key]}


def load_config(
    *, flags: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> LoadedConfig:
    """The configuration from flags > environment > file > defaults.

    flags: text by key (`{"listen.port": "0"}`). Raises InvalidInputError: unknown key, bad value, unreadable file, a
    store address that cannot be parsed.
    """
    values, sources = resolve(ServeConfig, flags=flags or {}, environment=environment or {}, file=file)
    config: ServeConfig = build(ServeConfig, values)
    config.gate_config()
    config.validation_config()
    for key in ("listen.host", "metrics.host", "store.data_dir", "planning.policy"):
        if not str(values[key]).strip():
            raise InvalidInputError(f"setting {key} is empty")
    if config.store.address != EMBEDDED:
        parse_address(config.store.address, password=config.store.password)
    return LoadedConfig(config=config, sources=sources)
