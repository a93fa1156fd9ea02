"""Settings of the hook: what is refused at start, and how it is said."""

from __future__ import annotations

import pytest

from agent.hook.config import HookConfig
from eplb_service.errors import InvalidInputError


def test_the_environment_sets_what_it_names() -> None:
    config = HookConfig.from_environment(
        {"EPLB_SOCKET": "/run/a.sock", "EPLB_STAGING_BYTES": "4096", "EPLB_OFF": "1", "EPLB_OFF_FILE": "/run/off", "OTHER": "x"}
    )
    assert (config.socket_path, config.staging_bytes, config.off, config.off_file) == ("/run/a.sock", 4096, True, "/run/off")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "set EPLB_SOCKET"),
        ({"EPLB_SOCKET": "/s", "EPLB_VOTE_PERIOD": "two"}, "EPLB_VOTE_PERIOD='two' is not a whole number"),
        ({"EPLB_SOCKET": "/s", "EPLB_VOTE_PERIOD": "0"}, "vote_period must be at least 1; got 0"),
        ({"EPLB_SOCKET": "/s", "EPLB_OFF": "maybe"}, "EPLB_OFF='maybe' is not 1 or 0"),
        ({"EPLB_SOCKET": "/s", "EPLB_STAGING_BYTES": "-1"}, "staging_bytes must be >= 0"),
        ({"EPLB_SOCKET": "/s", "EPLB_VOTE_TIMEOUT_S": "nan"}, "vote_timeout_s must be a positive number"),
        ({"EPLB_SOCKET": "/s", "EPLB_NIC": "mlx5_0,,mlx5_1"}, "nic '' has 0 characters; name it in EPLB_NIC"),
        ({"EPLB_SOCKET": "/s", "EPLB_SAME_NODE_COPIES": "ipc"}, "'ipc'; EPLB_SAME_NODE_COPIES may be send or read"),
        ({"EPLB_SOCKET": "/s", "EPLB_CROSS_NODE_COPIES": "rdma"}, "'rdma'; EPLB_CROSS_NODE_COPIES may be send or nixl"),
        ({"EPLB_SOCKET": "/s", "EPLB_NIC": "x" * 257}, "has 257 characters; name it in EPLB_NIC by 1 to 256"),
        ({"EPLB_SOCKET": "/s", "EPLB_SUB_WINDOWS": "33"}, "33 sub-windows do not fit a window of 32 steps"),
    ],
)
def test_what_cannot_be_used_is_refused_with_one_sentence(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        HookConfig.from_environment(environ)
    assert words in str(caught.value)


@pytest.mark.parametrize("mode", ["per_token", "per_pass", ""])
def test_a_recorder_mode_that_cannot_be_planned_on_is_refused_at_start_with_the_allowed_ones_sglang_7266(mode: str) -> None:
    with pytest.raises(InvalidInputError, match="allowed: window"):
        HookConfig(socket_path="/s", staging_bytes=0, recorder=mode)
