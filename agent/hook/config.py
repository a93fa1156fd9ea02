"""What the hook can be told, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.transfer.ways import Ways
from eplb_service.errors import InvalidInputError
from eplb_service.ids import ChunkId, GenerationNumber, LayerRef, RankId

NIC_CHARACTERS_MAX = 256
"""Most that a planner takes of a name."""

RECORDER_MODES = ("window",)
"""Ways of recording that a planner can use. Per-token and per-pass records cannot be planned on (sglang#7266)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookConfig:
    """Settings of one hook; the same on every rank of a group, except the paths and the NIC.

    socket_path: Unix socket of the node's agent process.
    vote_period: K, step boundaries between votes. window_steps: W, boundaries of a load window.
    sub_windows: parts of a window, each counted by itself. ring_windows: windows kept while nobody takes them.
    staging_bytes: staging buffer, allocated once at start; 0 = observe only.
    vote_timeout_s: how long a vote may take from the cast; longer than the skew between ranks at one boundary.
    rendezvous_timeout_s: how long the ranks may take to find one another at start and for each new mesh.
    close_timeout_s: how long `close` may wait for each of its threads.
    idle_after_s: no boundary for so long = the engine is idle; a longer step is not counted as a step time.
    pulse_period_s: seconds between signs of life. reconnect_max_s: longest pause between two tries to reach the agent process.
    off_file: while this file exists the hook is inert. off: inert from the start.
    recorder: one of RECORDER_MODES.
    same_node_copies: `send` = over gloo, as across nodes; `read` = ranks of a node read experts out of one another's memory
        where that can be (CUDA IPC; on a CPU memory of `agent.transfer.memory_handles.allocate_shared`), else they are sent.
    cross_node_copies: `send` = over gloo; `nixl` = experts are read out of the memory of ranks of other nodes over NIXL, where
        that package is and tensors lie contiguous within a slot, else they are sent.
    nic: NIC, or rail, by which this rank reaches other nodes; ranks of a node that share it name it alike. Or, where all ranks
        of a node have one environment, the NIC of each of them in the order of the group: `mlx5_0,mlx5_0,mlx5_1,mlx5_1`.
        None = its own.

    >>> HookConfig(socket_path="/run/eplb/agent.sock", staging_bytes=1 << 20).vote_period
    4
    """

    socket_path: str
    staging_bytes: int
    vote_period: int = 4
    window_steps: int = 32
    sub_windows: int = 4
    ring_windows: int = 64
    vote_timeout_s: float = 10.0
    rendezvous_timeout_s: float = 60.0
    close_timeout_s: float = 5.0
    idle_after_s: float = 1.0
    pulse_period_s: float = 1.0
    reconnect_max_s: float = 5.0
    off_file: str | None = None
    off: bool = False
    recorder: str = "window"
    nic: str | None = None
    same_node_copies: str = "send"
    cross_node_copies: str = "send"

    def __post_init__(self) -> None:
        for name in ("vote_period", "window_steps", "sub_windows", "ring_windows"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in (
            "vote_timeout_s",
            "rendezvous_timeout_s",
            "close_timeout_s",
            "idle_after_s",
            "pulse_period_s",
            "reconnect_max_s",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidInputError(f"{name} must be a positive number of seconds; got {getattr(self, name)}")
        if self.staging_bytes < 0:
            raise InvalidInputError(f"staging_bytes must be >= 0 (0 = observe only); got {self.staging_bytes}")
        if self.sub_windows > self.window_steps:
            raise InvalidInputError(
                f"{self.sub_windows} sub-windows do not fit a window of {self.window_steps} steps; use at most that many"
            )
        if not self.socket_path:
            raise InvalidInputError("socket_path is empty; set EPLB_SOCKET to the Unix socket of this node's agent process")
        if self.recorder not in RECORDER_MODES:
            raise InvalidInputError(
                f"recorder mode {self.recorder!r} cannot be planned on; allowed: {', '.join(RECORDER_MODES)} (sglang#7266)"
            )
        self.ways  # noqa: B018  # raises
        self._check_nics()

    def _check_nics(self) -> None:
        bad = next((nic for nic in self.nics if not 0 < len(nic) <= NIC_CHARACTERS_MAX or not nic.isprintable()), None)
        if bad is not None:
            raise InvalidInputError(
                f"nic {bad[:40]!r} has {len(bad)} characters; name it in EPLB_NIC by 1 to {NIC_CHARACTERS_MAX} printable ones,"
                " such as mlx5_0, or leave the variable out"
            )

    @property
    def ways(self) -> Ways:
        """How experts go between ranks. Raises InvalidInputError for a word that is none."""
        return Ways(same_node=self.same_node_copies, cross_node=self.cross_node_copies)

    @property
    def nics(self) -> tuple[str, ...]:
        """The names in `nic`; () = none."""
        return () if self.nic is None else tuple(name.strip() for name in self.nic.split(","))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HookConfig:
        """Settings from EPLB_* variables. Raises InvalidInputError naming the variable that cannot be used."""
        values: dict[str, Any] = {}
        for variable, (name, parse) in VARIABLES.items():
            text = environ.get(variable, "")
            if text:
                try:
                    values[name] = parse(text)
                except ValueError:
                    raise InvalidInputError(f"{variable}={text!r} is not {_WANTED[parse]}") from None
        values.setdefault("socket_path", "")
        values.setdefault("staging_bytes", 0)
        return cls(**values)


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


_WANTED: dict[Callable[[str], Any], str] = {int: "a whole number", float: "a number", str: "text", _flag: "1 or 0"}

VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "EPLB_SOCKET": ("socket_path", str),
    "EPLB_STAGING_BYTES": ("staging_bytes", int),
    "EPLB_VOTE_PERIOD": ("vote_period", int),
    "EPLB_WINDOW_STEPS": ("window_steps", int),
    "EPLB_SUB_WINDOWS": ("sub_windows", int),
    "EPLB_RING_WINDOWS": ("ring_windows", int),
    "EPLB_VOTE_TIMEOUT_S": ("vote_timeout_s", float),
    "EPLB_RENDEZVOUS_TIMEOUT_S": ("rendezvous_timeout_s", float),
    "EPLB_OFF": ("off", _flag),
    "EPLB_OFF_FILE": ("off_file", str),
    "EPLB_RECORDER": ("recorder", str),
    "EPLB_NIC": ("nic", str),
    "EPLB_SAME_NODE_COPIES": ("same_node_copies", str),
    "EPLB_CROSS_NODE_COPIES": ("cross_node_copies", str),
}
"""Environment variable → setting and how it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookStatus:
    """What a hook says of itself at one moment.

    voting: takes part in votes and in rollouts; off_reason says why not. boundary: step boundaries begun so far.
    generations: what each layer routes by now. flipped_id: last chunk that became live. open_id: chunk under way, 0 = none.
    connected: to the agent process. reads_from: ranks whose memory experts are read from.
    staging_bytes: memory on the device that staging and sending take, allocated at the start and never again.
    unreachable: experts, over all layers, that no rank of the group holds: while there are any, no request can be served.
    Counters run since the start. pauses, paused_s: how often and how long in all experts waited for the engine to be under less
    pressure.
    """

    voting: bool
    off_reason: str
    boundary: int
    connected: bool
    open_id: ChunkId
    flipped_id: ChunkId
    generations: Mapping[LayerRef, GenerationNumber]
    windows_sent: int
    windows_dropped: int
    flips: int
    refusals: Mapping[str, int] = field(default_factory=dict)
    stray_ids: int = 0
    reads_from: tuple[RankId, ...] = ()
    staging_bytes: int = 0
    pauses: int = 0
    paused_s: float = 0.0
    unreachable: int = 0
