"""Counts what the routers choose, without ever making the device wait for the host.

`record` adds to counters at fixed addresses, so it may be part of a captured graph. At a sub-window's edge the counters are
added to that sub-window on the device; at a window's edge the window is copied to one of two host buffers and an event is
recorded. Later boundaries look whether the event is reached, never wait (vllm-ascend#4214, sglang#18587), and hand the window
to the ring. While a graph is being captured nothing is flushed; the counters go on (sglang#32105, sglang#32106).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from agent.hook.outbox import Outbox
from agent.transfer.streams import DeviceEvent, Streams
from eplb_service.control import Address
from eplb_service.ids import LayerRef, Phase
from eplb_service.window.report import CountBasis, LoadReport, Semantics, TableCounts

HOST_BUFFERS = 2


@dataclass(slots=True)
class _Counters:
    """Device counters of the layers of one model with equal E. Column E takes ids outside [0, E).

    current: shape (L, E + 1), int64, the running sub-window. window: shape (V, L, E + 1). host: HOST_BUFFERS times the same.
    """

    model: str
    layer_ids: tuple[int, ...]
    num_logical: int
    current: torch.Tensor
    window: torch.Tensor
    host: list[torch.Tensor]


@dataclass(slots=True)
class _Steps:
    """What is known on the host of the running window."""

    begin: int
    live_digest_begin: int
    forward_passes: int = 0
    tokens: int = 0
    warmup: bool = False
    times_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Flushed:
    buffer: int
    event: DeviceEvent
    report: LoadReport


class Recorder:
    """One rank's windows. Every method is called on the engine's model thread.

    layers: of all models, with E. clock: monotonic seconds. idle_after_s: a longer step is idleness, not a step time.
    """

    def __init__(
        self,
        layers: Sequence[tuple[LayerRef, int]],
        *,
        address: Address,
        phase: Phase,
        window_steps: int,
        sub_windows: int,
        idle_after_s: float,
        device: torch.device,
        streams: Streams,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self._address, self._phase = address, phase
        self._window_steps, self._sub_windows, self._idle_after_s = window_steps, sub_windows, idle_after_s
        self._streams, self._outbox, self._clock = streams, outbox, clock
        self._tables = _allocate(layers, sub_windows, device, streams)
        self._rows = {
            LayerRef(table.model, layer_id): (table.current[row], table.num_logical)
            for table in self._tables
            for row, layer_id in enumerate(table.layer_ids)
        }
        self._steps: _Steps | None = None
        self._boundary = -1
        self._live_digest = 0
        self._counting = (0, 0)  # window and sub-window that the counters belong to
        self._previous: tuple[float, int] | None = None  # time and real tokens of the last boundary
        self._warmup = False
        self._warmup_depth = 0
        self._flushed: deque[_Flushed] = deque()
        self._free = deque(range(HOST_BUFFERS))
        self.stray_ids = 0

    # ── what the engine does ─────────────────────────────────────────────────────────────────────────────────────────────

    def record(self, layer: LayerRef, experts: torch.Tensor) -> None:
        """Count logical ids, shape (n, k), of real tokens. Raises KeyError for a layer that was not registered."""
        if self._warmup or self._warmup_depth or experts.numel() == 0:
            return
        row, num_logical = self._rows[layer]
        ids = experts.reshape(-1).to(torch.int64)
        ids = torch.where((ids >= 0) & (ids < num_logical), ids, num_logical)
        row.scatter_add_(0, ids, torch.ones_like(ids))

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Nothing inside is counted; the flag is restored however the block ends (vllm#56716)."""
        self._warmup_depth += 1
        try:
            yield
        finally:
            self._warmup_depth -= 1

    def boundary(self, boundary: int, *, num_real_tokens: int, warmup: bool, capturing: bool, live_digest: int) -> None:
        """A step begins; what it routes by has this digest. Edges of windows are handled here."""
        self._warmup = warmup
        unusable = warmup or capturing or self._warmup_depth > 0
        now = self._clock()
        if self._steps is not None:
            self._time_step(now, num_real_tokens)
            if not capturing:
                self._pass_edges(boundary)
        if self._steps is None:
            self._steps = _Steps(begin=boundary, live_digest_begin=live_digest)
            self._counting = self._position(boundary)
        steps = self._steps
        steps.forward_passes += 1
        steps.tokens += 0 if unusable else num_real_tokens
        steps.warmup = steps.warmup or unusable
        self._boundary, self._live_digest = boundary, live_digest
        self._previous = (now, 0 if unusable else num_real_tokens)
        if not capturing:
            self.poll()

    def pause(self) -> None:
        """Forget the running window: the hook is inert, or what was counted cannot be trusted."""
        self._steps, self._previous = None, None
        with self._streams.on_compute_stream():
            for table in self._tables:
                table.current.zero_()
                table.window.zero_()

    def enter(self, address: Address) -> None:
        """Go on in another group, whose windows begin with its first step."""
        self.pause()
        self._address = address

    def poll(self) -> None:
        """Hand over windows whose copy has reached the host. Never waits."""
        while self._flushed and self._flushed[0].event.is_reached():
            done = self._flushed.popleft()
            tables = tuple(self._read(table, done.buffer) for table in self._tables)
            self._free.append(done.buffer)
            self._outbox.put_window(dataclasses.replace(done.report, tables=tables))

    # ── edges ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _time_step(self, now: float, num_real_tokens: int) -> None:
        if self._previous is None or self._steps is None:
            return
        began, tokens = self._previous
        if tokens > 0 and num_real_tokens > 0 and now - began <= self._idle_after_s:
            self._steps.times_s.append(now - began)

    def _pass_edges(self, boundary: int) -> None:
        """Before this step: fold the sub-window, flush the window, if what was counted so far belongs to earlier ones.

        After a capture that is more than one step ago, so the edge is not between the last step and this one.
        """
        old, new = self._counting, self._position(boundary)
        if old == new:
            return
        self._counting = new
        with self._streams.on_compute_stream():
            for table in self._tables:
                table.window[old[1]].add_(table.current)
                table.current.zero_()
            if old[0] != new[0]:
                self._flush(old[0])

    def _position(self, boundary: int) -> tuple[int, int]:
        """Window and sub-window of a step."""
        window, step = divmod(boundary, self._window_steps)
        return window, step * self._sub_windows // self._window_steps

    def _flush(self, window: int) -> None:
        report = self._report(window)
        self._steps = None
        if not self._free:
            self.poll()
        if not self._free:  # the device is two windows behind: losing one is better than waiting for it
            self._outbox.drop_window()
        else:
            buffer = self._free.popleft()
            for table in self._tables:
                table.host[buffer].copy_(table.window, non_blocking=True)
            self._flushed.append(_Flushed(buffer, self._streams.record(), report))
        for table in self._tables:
            table.window.zero_()

    def _report(self, window: int) -> LoadReport:
        steps = self._steps
        if steps is None:
            raise RuntimeError(f"window {window} has no steps")  # guarded by `boundary`
        first, last = window * self._window_steps, (window + 1) * self._window_steps
        times = steps.times_s
        return LoadReport(
            rank_id=self._address.rank_id,
            incarnation=self._address.incarnation,
            group_id=self._address.group_id,
            window_index=window,
            boundary_begin=max(first, min(steps.begin, last - 1)),
            boundary_end=max(min(self._boundary + 1, last), first + 1),
            forward_passes=steps.forward_passes,
            tokens=steps.tokens,
            semantics=Semantics.LOCAL_TOKENS,
            phase=self._phase,
            live_digest_begin=steps.live_digest_begin,
            live_digest_end=self._live_digest,
            tables=(),
            warmup=steps.warmup,
            basis=CountBasis.LOGICAL,
            step_time_min_s=min(times, default=0.0),
            step_time_mean_s=min(max(sum(times) / len(times), min(times)), max(times)) if times else 0.0,
            step_time_max_s=max(times, default=0.0),
        )

    def _read(self, table: _Counters, buffer: int) -> TableCounts:
        counts = table.host[buffer].numpy()
        self.stray_ids += int(counts[:, :, table.num_logical].sum())
        return TableCounts(
            model=table.model,
            layer_ids=tuple(table.layer_ids),
            counts=np.ascontiguousarray(counts[:, :, : table.num_logical]).astype(np.int64, copy=True),
        )


def _allocate(
    layers: Sequence[tuple[LayerRef, int]], sub_windows: int, device: torch.device, streams: Streams
) -> list[_Counters]:
    """One set of counters for each (model, E), in order of appearance."""
    groups: dict[tuple[str, int], list[int]] = {}
    for layer, num_logical in layers:
        groups.setdefault((layer.model, num_logical), []).append(layer.layer_id)
    tables = []
    for (model, num_logical), layer_ids in groups.items():
        shape = (sub_windows, len(layer_ids), num_logical + 1)
        num_bytes = 8 * shape[0] * shape[1] * shape[2]
        tables.append(
            _Counters(
                model=model,
                layer_ids=tuple(layer_ids),
                num_logical=num_logical,
                current=torch.zeros(shape[1:], dtype=torch.int64, device=device),
                window=torch.zeros(shape, dtype=torch.int64, device=device),
                host=[streams.host_buffer(num_bytes).view(torch.int64).view(shape) for _ in range(HOST_BUFFERS)],
            )
        )
    return tables
