"""Runs a scenario: a text of a line for each thing that happens, over the parts of the simulation.

A scenario opens with its hazard, in lines that begin with `#`; `# without: NAME` names a rule of `tests.sim.mutations` without
which it must end in a violation. README.md beside the scenarios lists all that a line may say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.scenarios.stage import ScenarioError, Stage


@dataclass(frozen=True)
class Scenario:
    """One file. without: rules whose loss it shows."""

    name: str
    hazard: str
    without: tuple[str, ...]
    lines: tuple[tuple[int, str], ...]

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Raises ScenarioError for a file that does not open with its hazard."""
        texts = path.read_text().splitlines()
        comments = [text[1:].strip() for text in texts if text.startswith("#")]
        without = tuple(text.partition(":")[2].strip() for text in comments if text.startswith("without:"))
        if not texts or not texts[0].startswith("# Hazard:"):
            raise ScenarioError(f"{path.name} does not open with '# Hazard:'")
        lines = [(number, text.strip()) for number, text in enumerate(texts, 1) if text.strip() and not text.startswith("#")]
        return cls(path.stem, " ".join(comments), without, tuple(lines))

    def run(self, *, expecting: bool = True) -> Stage:
        """Line by line. expecting: whether lines that begin with `expect` are looked at."""
        stage = Stage()
        for number, line in self.lines:
            if line.startswith("expect") and not expecting:
                continue
            stage.world.note("» {}", line)
            try:
                _do(stage, line)
            except (ScenarioError, LookupError, ValueError) as error:
                trace = "\n".join(stage.world.trace[-40:])
                raise ScenarioError(f"{self.name}.txt:{number}: {line}: {error}\n{trace}") from error
        stage.checkers.check_all()
        return stage


def _do(stage: Stage, line: str) -> None:
    for pattern, action in _ACTIONS:
        found = re.fullmatch(pattern, line)
        if found is not None:
            action(stage, **{name: value or "" for name, value in found.groupdict().items()})
            stage.checkers.settle()
            return
    raise ScenarioError("no line says that")


_R = r"(?P<ranks>all|\d+(?:,\d+)*)"
_P = r"(?P<name>P\d+)"
_L = r"(?: (?P<kind>[A-Z][a-z]+))?(?: to (?P<to>[P\d,]+))?(?: from (?P<of>[P\d,]+))?"

_ACTIONS: tuple[tuple[str, Callable[..., None]], ...] = (
    (r"(?P<ranks>\d+) ranks, a vote every (?P<period>\d+) steps?", Stage.set_up),
    (rf"{_P} starts(?P<learns> and learns what is live)?", Stage.start_planner),
    (rf"{_P} publishes a generation(?: of (?P<layers>\d) layers)?", Stage.publish),
    (rf"{_P} publishes a generation that swaps slots (?P<one>\d+) and (?P<other>\d+)", Stage.publish_swap),
    (rf"an operator stops {_P}", Stage.cancel),
    (rf"{_P} dies", Stage.kill_planner),
    (rf"the lease of {_P} lapses", Stage.lapse),
    (rf"{_P} loses the streams? of {_R}", Stage.detach),
    (rf"{_P} has the streams? of {_R} again", Stage.attach),
    (rf"deliver{_L}", Stage.deliver),
    (rf"lose{_L}", Stage.lose),
    (rf"hold{_L}", Stage.hold),
    (r"release(?: (?P<kind>[A-Z][a-z]+))?", Stage.release),
    (rf"again{_L}", Stage.repeat),
    (rf"step(?: {_R})?(?:, (?P<times>\d+) times)?", Stage.step),
    (rf"copies end(?: on {_R})?", Stage.end_copies),
    (rf"the copy on {_R} fails: (?P<why>.+)", Stage.fail_copy),
    (rf"the next copy on {_R} brings other bytes", Stage.corrupt_copy),
    (rf"late bytes arrive on {_R}", Stage.late_bytes),
    (rf"{_R} learns? how the vote ended", Stage.learn_vote),
    (rf"{_R} loses? the vote", Stage.lose_vote),
    (r"the engine is idle", Stage.idle),
    (r"wait (?P<seconds>[\d.]+) s", Stage.wait),
    (rf"ranks? {_R} (?P<what>stops?|goes? on|leaves?|dies?)", Stage.befall),
    (r"the engine restarts(?P<live> from what was live)?", Stage.restart),
    (r"the engine can form its group again(?P<backups>, with backups)?", Stage.can_reform),
    (r"the group forms again(?:, (?P<joining>\d) joins?)?", Stage.form),
    (r"the group begins to form again(?:, (?P<joining>\d) joins?)?", Stage.begin_forming),
    (rf"{_P} publishes a generation with all experts", Stage.publish_whole),
    (r"expect (?P<number>\d+) experts without a slot", Stage.expect_lost),
    (r"weights change", Stage.reload),
    (r"the store (?P<what>goes away|comes back|is saved|goes back|loses everything)", Stage.change_store),
    (r"another writes generation (?P<number>\d+)", Stage.write_document),
    (rf"expect ranks? {_R} (?:is|are) (?P<state>[a-z]+)", Stage.expect_ranks),
    (rf"expect ranks? {_R} to route generation (?P<number>\d+)", Stage.expect_route),
    (rf"expect ranks? {_R} to take no part: (?P<text>.+)", Stage.expect_off),
    (rf"expect ranks? {_R} to have ended", Stage.expect_ended),
    (rf"expect {_P} to be (?P<state>.+)", Stage.expect_planner),
    (rf"expect {_P} to have ended it (?P<outcome>[a-z_]+)(?:: (?P<text>.+))?", Stage.expect_finished),
    (rf"expect {_P} to say (?P<text>.+)", Stage.expect_reason),
    (rf"expect ranks? {_R} to have said (?P<negated>no )?(?P<kind>[A-Z][a-z]+)", Stage.expect_said),
    (rf"expect {_P} to have sent no (?P<kind>[A-Z][a-z]+)", Stage.expect_sent),
    (r"expect that all ranks serve", Stage.expect_serving),
    (rf"expect {_P} to lead in epoch (?P<number>\d+)", Stage.expect_epoch),
)


def scenarios() -> Iterator[Scenario]:
    """All files of this folder."""
    for path in sorted(Path(__file__).parent.glob("*.txt")):
        yield Scenario.read(path)
