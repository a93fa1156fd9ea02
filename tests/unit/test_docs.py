"""The documentation against the code: command lines parse, links lead somewhere, tables of variables are complete."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from agent.hook.config import VARIABLES, HookConfig
from benchmarks.planner import ROWS
from benchmarks.planning_page import blocks_of, commands_of, make_files
from benchmarks.report import END, START
from demo.ranks import ranks
from eplb_service.cli.root import root, run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]
PLANNING = ROOT / "docs" / "planning.md"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def command_lines(text: str) -> Iterator[list[str]]:
    """Words after `eplb` of every command line: in code blocks, and in `code` that has more than a command's name."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text.replace("\\\n", " "), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    prose = without_blocks(text)
    lines += [code.replace("\n", " ") for code in re.findall(r"`(eplb [^`]+)`", prose)]
    for line in lines:
        found = re.match(r"(?:\$ |.* -- |.* exec \S+ )?(?:\w+=\S+ )*eplb ((?!:)\S.*)", line.strip())
        if found and found[1] != "=":
            yield shlex.split(found[1], comments=True)


def parse(words: list[str]) -> None:
    """Have click read a command line, without running it. Placeholders of the text stand for values."""
    filled = ["1" if word in {"NUMBER", "N"} else word for word in words if word != "…"]
    command: click.Command = root
    context = click.Context(root, info_name="eplb")
    while isinstance(command, click.Group):
        if not filled or filled[0].startswith("-"):
            command.make_context("eplb", filled or ["--version"], resilient_parsing=True)
            return
        found = command.get_command(context, filled[0])
        if found is None:
            raise click.UsageError(f"no such command {filled[0]}")
        command, filled = found, filled[1:]
    if "--help" in filled:
        filled.remove("--help")
        command.make_context("eplb", filled, resilient_parsing=True)
    elif filled:
        command.make_context("eplb", filled)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_line_is_one_that_the_commands_take(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLB_PLANNER", "127.0.0.1:7470")
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(PLANNING.read_text()):
        if block.language == "toml":
            make_files(block, tmp_path)  # --fleet is read when a line is parsed
    wrong = []
    for words in command_lines(page.read_text()):
        try:
            parse(words)
        except click.ClickException as error:
            wrong.append(f"eplb {shlex.join(words)}: {error.format_message()}")
    assert wrong == []


def test_command_lines_are_found_and_wrong_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_PLANNER", raising=False)
    block = "$ eplb status --nope\nA=b eplb rollback 1  # back\neplb: no command\nkubectl exec p -- eplb status\n"
    text = f"`eplb plan -d x` and\n```\n{block}```\n"
    found = list(command_lines(text))
    assert found == [["status", "--nope"], ["rollback", "1"], ["status"], ["plan", "-d", "x"]]
    parse(found[1])
    for words in (found[0], ["rollback", "x"], ["stauts"], ["placement", "shwo"], ["generations", "list", "--limit", "0"]):
        with pytest.raises(click.ClickException):
            parse(words)
    quick_start = list(command_lines((ROOT / "docs" / "quickstart.md").read_text()))
    assert len(quick_start) > 20
    assert {words[0] for words in quick_start} >= {"demo", "serve", "agent", "status", "plan", "rebalance", "rollback", "pause"}


def test_command_lines_of_the_demo_ranks_parse() -> None:
    lines = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("python -m demo.ranks")]
    assert lines
    for line in lines:
        ranks.make_context("ranks", shlex.split(line)[3:])


def anchors_of(text: str) -> set[str]:
    """What links may name in a page: its headings, as GitHub makes anchors of them; equal ones are numbered."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*)$", without_blocks(text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
        found.add(f"{name}-{number}" if number else name)
    return found


def without_blocks(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def broken_links(text: str, folder: Path) -> list[str]:
    """Links, and pictures, of a page in a folder that lead to no file, or to no heading of a page."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
        name, _, anchor = link.partition("#")
        file = folder / name
        if "://" in link or (name and file.exists() and not anchor):
            continue
        target = text if not name else file.read_text() if file.suffix == ".md" and file.exists() else ""
        if anchor not in anchors_of(target):
            broken.append(link)
    return broken


FOLDERS = ("docs", "deploy", "examples", "tests", "benchmarks")
ALL_PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]


@pytest.mark.parametrize("page", ALL_PAGES, ids=[str(page.relative_to(ROOT)) for page in ALL_PAGES])
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `thing`, and more\n## Twice\n## Twice\n```\n# no heading\n```\n")
    (tmp_path / "a.png").touch()
    good = "[a](other.md) [b](other.md#one-thing-and-more) [c](other.md#twice-1) ![d](a.png) [e](https://x.y/z#w) [f](#here)\n"
    assert broken_links(good + "## Here\n", tmp_path) == []
    bad = ["none.md", "other.md#no-heading", "other.md#twice-2", "#there", "a.png#x", "none.md#x"]
    assert broken_links(" ".join(f"[x]({link})" for link in bad), tmp_path) == bad


def test_table_of_the_hooks_variables_is_complete_and_its_defaults_are_true() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text()
    rows = dict(re.findall(r"^\| `(EPLB_\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert list(rows) == list(VARIABLES)
    defaults = {field.name: field.default for field in dataclasses.fields(HookConfig)}
    for variable, shown in rows.items():
        name = VARIABLES[variable][0]
        default = 0 if name == "staging_bytes" else defaults[name]
        absent = default is None or default is dataclasses.MISSING
        assert shown == ("–" if absent else str(default).lower() if isinstance(default, bool) else str(default)), variable


def test_files_of_settings_in_the_documentation_load(tmp_path: Path) -> None:
    from eplb_service.config import load_config

    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if not block.startswith(("# fleet.toml", "[project"))
    ]
    assert blocks
    for block in blocks:
        file = tmp_path / "planner.toml"
        file.write_text(block)
        assert load_config(file=file).given()


LAYERS, LAYERS_RUN, WORK_RUN = 58, 2, 200_000


def test_every_command_of_the_planning_page_does_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the first layers of the page's loads, which takes seconds; `make planning-page` runs them whole."""
    monkeypatch.chdir(tmp_path)
    wrong, ran = [], 0
    for block in blocks_of(PLANNING.read_text()):
        if make_files(block, tmp_path):
            for file in tmp_path.glob("*.npy"):
                array = np.load(file)
                if LAYERS in array.shape:
                    np.save(file, np.take(array, range(LAYERS_RUN), axis=array.shape.index(LAYERS)))
            continue
        refusals = [
            shown.startswith("eplb: ") for shown in re.split(r"^\$ .*\n(?:    .*\n)*", block.content, flags=re.MULTILINE)[1:]
        ]
        for command, is_refused in zip(commands_of(block), refusals, strict=True):
            words = re.sub(r" --effort \w+", "", command)  # a small budget of work instead
            code = run([*shlex.split(words)[1:], "--work-budget", str(WORK_RUN)])
            said = capsys.readouterr()
            ran += 1
            if (code != 0) != is_refused or "not installed" in said.err:
                wrong.append(f"{command}: exit code {code}, {said.err}")
    assert wrong == []
    assert ran > 20


def test_planning_page_shows_every_option_of_plans_from_files() -> None:
    from eplb_service.cli.plan import GROUPS, plan

    text = PLANNING.read_text()
    live = set(GROUPS["Dry run on a planner (without --load)"])
    missing = [
        option.opts[0]
        for option in plan.params
        if option.name not in live and not any(re.search(rf"{flag}\b", text) for flag in option.opts)
    ]
    in_file = {key.replace("_", "-") for key in re.findall(r"^(\w+) = ", text, re.MULTILINE)}
    assert [flag for flag in missing if flag.removeprefix("--") not in in_file] == []


def test_table_of_figures_is_of_rows_that_the_benchmark_has() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in ("figures", "seeds", "sizes", "planners"):
        assert text.count(START.format(name=name)) == text.count(END.format(name=name)) == 1
    table = text.split(START.format(name="figures"))[1].split(END.format(name="figures"))[0]
    shown = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert shown == [row.what for row in ROWS]


def test_policy_in_the_documentation_is_the_example_whole() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    assert (ROOT / "examples" / "policy_plugin" / "trade_policy.py").read_text() in text


def test_policies_in_the_documentation_are_those_installed() -> None:
    from importlib.metadata import entry_points

    text = (ROOT / "docs" / "policies.md").read_text()
    shown = set(re.findall(r"^## `(\w+)`", text, re.MULTILINE))
    ours = {entry.name for entry in entry_points(group="eplb.policies") if entry.value.startswith("eplb_service.")}
    assert shown == ours
