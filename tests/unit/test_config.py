"""Settings: flags > environment > file > defaults, and one clear sentence for everything that is not a setting."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from eplb_service.config import ServeConfig, changed, load_config, shown
from eplb_service.control import Throttle
from eplb_service.costs import GivenCosts
from eplb_service.errors import InvalidInputError
from eplb_service.gate import GateConfig
from eplb_service.policy.base import Constraints, ExpertOnRank, Resilience
from eplb_service.rollout.events import RolloutSettings
from eplb_service.settings import settings_of
from eplb_service.validation import ValidationConfig

COST = {
    "cost.seconds_per_step": "0.02",
    "cost.horizon_steps": "1000",
    "cost.bytes_per_s": "1e9",
    "cost.commit_stall_s": "0",
}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "planner.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "[listen]\nport = 1\nhost = 'file'\n[planning]\nmode = 'auto'\n")
    environment = {"EPLB_LISTEN_PORT": "2", "EPLB_LISTEN_HOST": "environment"}
    loaded = load_config(flags={"listen.port": "3"}, environment=environment, file=file)
    assert (loaded.config.listen.port, loaded.config.listen.host, loaded.config.planning.mode) == (3, "environment", "auto")
    assert loaded.config.store.address == "embedded"
    wanted = {"listen.port": "flag", "listen.host": "environment", "planning.mode": "file", "store.address": "default"}
    assert {key: loaded.sources[key] for key in wanted} == wanted


def test_new_deployments_observe_unless_configured() -> None:
    assert load_config().config.planning.mode == "observe"
    assert load_config(flags={"planning.mode": "auto"}).config.planning.mode == "auto"


def test_every_setting_says_what_it_is_and_the_default_obeys_its_own_range() -> None:
    for found in settings_of(ServeConfig):
        assert len(found.help) > 8, found.key
        if found.default is not None:
            assert found.check(found.default, "default") == found.default
        if found.key.endswith("_s"):
            assert found.unit == ("bytes/s" if "per_s" in found.key else "s"), found.key


def test_default_gate_is_that_of_the_gate_module() -> None:
    assert load_config().config.gate_config() == GateConfig()


def test_default_rollout_is_that_of_the_rollout_module() -> None:
    assert load_config().config.rollout.settings() == RolloutSettings()


def test_a_throttle_reaches_the_ranks_and_the_price_of_moves() -> None:
    assert load_config().config.rollout_settings() == RolloutSettings()
    config = load_config(flags={"transfer.bytes_per_s": "2e8", "transfer.time_share": "0.25"}).config
    assert config.rollout_settings() == RolloutSettings(throttle=Throttle(bytes_per_s=2e8, time_share=0.25))
    throttle = Throttle(bytes_per_s=2e8, time_share=0.25)
    assert config.given_costs() == GivenCosts(throttle=throttle, commit_stall_s_max=0.01)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("transfer.bytes_per_s", "5e5", "setting transfer.bytes_per_s is 500000: use at least 1e+06 bytes/s"),
        ("transfer.bytes_per_s", "-1", "use at least 0 bytes/s"),
        ("transfer.time_share", "0", "use at least 0.01 and at most 1"),
        ("transfer.time_share", "1.5", "use at least 0.01 and at most 1"),
    ],
)
def test_a_throttle_that_would_never_end_is_refused_with_the_numbers(key: str, value: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        load_config(flags={key: value})
    assert message in str(refusal.value)


def test_given_costs_reach_the_gate_and_the_others_are_left_to_be_measured() -> None:
    assert load_config().config.given_costs() == GivenCosts(commit_stall_s_max=0.01)
    costs = load_config(flags=COST).config.given_costs()
    assert (costs.seconds_per_step, costs.horizon_steps, costs.bytes_per_s, costs.commit_stall_s) == (0.02, 1000, 1e9, 0.0)
    assert (costs.copy_interference, costs.cross_node_bytes_per_s) == (None, None)
    part = load_config(flags={"cost.cross_node_bytes_per_s": "2e9"}).config.given_costs()
    assert part == GivenCosts(cross_node_bytes_per_s=2e9, commit_stall_s_max=0.01)


def test_validation_settings_reach_the_judge() -> None:
    assert load_config().config.validation_config() == ValidationConfig()
    given = load_config(flags={"validation.windows": "9", "validation.roll_back": "false"}).config.validation_config()
    assert given == ValidationConfig(windows=9, roll_back=False)


def test_planning_limits_become_constraints_of_the_problem() -> None:
    flags = {
        "planning.max_moves": "100",
        "planning.num_groups": "8",
        "planning.group_price": "2",
        "planning.pins": "12@3, 7@0/5",
        "planning.bars": "1@2",
    }
    constraints = load_config(flags=flags | {"planning.resilient_share": "0.2"}).config.planning.constraints(max_replicas=7)
    assert constraints == Constraints(
        max_moves=100,
        num_groups=8,
        group_price=2.0,
        pinned=frozenset({ExpertOnRank(12, 3), ExpertOnRank(7, 0, 5)}),
        barred=frozenset({ExpertOnRank(1, 2)}),
        max_replicas=7,
        resilience=Resilience(hot_share=0.2),
    )
    assert load_config().config.planning.constraints(max_replicas=7) == Constraints(max_replicas=7)


@pytest.mark.parametrize("key", ["planning.pins", "planning.bars"])
def test_residency_that_cannot_be_read_ends_the_start_with_an_example(key: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"{key}.*'12-3' is not EXPERT@RANK.*12@3/5"):
        load_config(flags={key: "7@0, 12-3"}, environment={})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"EPLB_GATE_MIN_COVERGE": "1"}, ["EPLB_GATE_MIN_COVERGE", "nearest known one is EPLB_GATE_MIN_COVERAGE"]),
        ({"EPLB_NONSENSE": "1"}, ["EPLB_NONSENSE names no setting", "eplb serve --help"]),
        ({"EPLB_PORT": "7470"}, ["EPLB_PORT names no setting"]),
        ({"EPLB_LISTEN_PORT": "http"}, ["listen.port", "EPLB_LISTEN_PORT", "'http'", "a whole number"]),
        ({"EPLB_LISTEN_PORT": "70000"}, ["listen.port", "70000", "at most 65535"]),
        ({"EPLB_LISTEN_PORT": "-1"}, ["at least 0"]),
        ({"EPLB_LISTEN_PORT": ""}, ["listen.port", "''"]),
        ({"EPLB_LISTEN_HOST": " "}, ["listen.host is empty"]),
        ({"EPLB_ROLLOUT_ARM_TTL_S": "0"}, ["rollout.arm_ttl_s", "more than 0 s"]),
        ({"EPLB_ROLLOUT_ARM_TTL_S": "nan"}, ["finite"]),
        ({"EPLB_ROLLOUT_ARM_TTL_S": "inf"}, ["finite"]),
        ({"EPLB_STORE_LEASE_S": "-3"}, ["store.lease_s", "at least 1"]),
        ({"EPLB_PLANNING_MODE": "atuo"}, ["planning.mode", "observe or auto", "did you mean auto?"]),
        ({"EPLB_METRICS_ENABLED": "perhaps"}, ["metrics.enabled", "true or false"]),
        ({"EPLB_GATE_MIN_COVERAGE": "1.5"}, ["gate.min_coverage", "at most 1"]),
        ({"EPLB_STORE_ADDRESS": "http://x"}, ["'http'", "redis://"]),
        ({"EPLB_LOG_FORMAT": "xml"}, ["console or json"]),
        ({"EPLB_LISTEN_HOST": "a\nb"}, ["listen.host", "printable"]),
    ],
)
def test_bad_environment_is_one_sentence(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load_config(environment=environment)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_of_other_parts_and_of_kubernetes_are_no_mistakes() -> None:
    environment = {
        "EPLB_PORT": "tcp://10.0.0.1:7470",
        "EPLB_SERVICE_HOST": "10.0.0.1",
        "EPLB_SERVICE_PORT": "7470",
        "EPLB_SERVICE_PORT_GRPC": "7470",
        "EPLB_PORT_7470_TCP_ADDR": "10.0.0.1",
        "EPLB_PORT_7470_TCP": "tcp://10.0.0.1:7470",
        "EPLB_FAILPOINTS": "",
        "EPLB_HOOK_OFF": "1",
        "EPLB_SOCKET": "/run/eplb/agent.sock",
        "EPLB_STAGING_BYTES": "1",
        "EPLB_DEPLOYMENT": "chat",
        "EPLB_PLANNER": "planner:7470",
        "EPLBX": "1",
        "PATH": "/bin",
    }
    assert load_config(environment=environment).config == ServeConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gate]\nmin_coverge = 1\n", ["gate.min_coverge", "nearest known one is gate.min_coverage"]),
        ("[gates]\nmin_coverage = 1\n", ["gates.min_coverage", "gate.min_coverage"]),
        ("port = 1\n", ["'port' names no setting"]),
        ("gate = 1\n", ["'gate' names no setting"]),
        ("[listen]\nport = '7470'\n", ["listen.port", "whole number"]),
        ("[listen]\nport = 7470.0\n", ["listen.port", "whole number"]),
        ("[listen]\nport = true\n", ["listen.port", "whole number"]),
        ("[metrics]\nenabled = 1\n", ["metrics.enabled", "true or false"]),
        ("[gate.min_coverage]\nx = 1\n", ["gate.min_coverage"]),
        ("[[gate]]\nx = 1\n", ["gate"]),
        ("[gate\n", ["is not TOML"]),
    ],
)
def test_bad_file_is_one_sentence_naming_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InvalidInputError) as caught:
        load_config(file=file)
    for word in (*words, str(file)):
        assert word in str(caught.value)


def test_integers_are_fine_where_numbers_are_wanted(tmp_path: Path) -> None:
    assert load_config(file=write(tmp_path, "[gate]\nmin_coverage = 1\n")).config.gate.min_coverage == 1.0


def test_file_that_is_not_there_or_no_text_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"nowhere\.toml cannot be read: No such file"):
        load_config(file=tmp_path / "nowhere.toml")
    with pytest.raises(InvalidInputError, match="cannot be read: Is a directory"):
        load_config(file=tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="is not TOML"):
        load_config(file=binary)


def test_what_is_in_effect_and_not_a_default_is_known_wherever_it_comes_from_trtllm_18626(tmp_path: Path) -> None:
    """A section of a configuration that is silently ignored: here what is in effect can be looked up (`eplb status`)."""
    file = write(tmp_path, "[gate]\nmin_coverage = 1\n[planning]\nmode = 'observe'\n")
    loaded = load_config(file=file, environment={"EPLB_COST_HORIZON_STEPS": "5000"}, flags={"store.password": "x"})
    assert changed(loaded.config) == {"gate.min_coverage": "1.0", "cost.horizon_steps": "5000", "store.password": "***"}
    assert loaded.given() == {**changed(loaded.config), "planning.mode": "observe"}  # given, and the default all the same


def test_secrets_are_shown_nowhere() -> None:
    loaded = load_config(environment={"EPLB_STORE_PASSWORD": "hunter2", "EPLB_STORE_ADDRESS": "redis://cache"})
    assert loaded.config.store.password == "hunter2"
    assert "hunter2" not in str(loaded.given())
    within = load_config(flags={"store.address": "redis://me:hunter2@cache:7000/3"})
    for texts in (within.given(), changed(within.config), shown(loaded.config)):
        assert "hunter2" not in str(texts)
    assert within.given() == {"store.address": "redis://cache:7000 database 3"}
    with pytest.raises(InvalidInputError) as caught:
        load_config(environment={"EPLB_STORE_PASSWORD": "hunter2\n"})
    assert "hunter2" not in str(caught.value)


def test_every_field_is_a_setting_or_a_section() -> None:
    for field in fields(ServeConfig):
        kind = field.default_factory
        assert isinstance(kind, type)
        assert is_dataclass(kind)
        assert all("setting" in inner.metadata for inner in fields(kind))
