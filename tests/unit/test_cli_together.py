"""`eplb plan --together`: what the page and the document say, and mistakes in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from eplb_service.cli.root import run

LAYERS, EXPERTS = 2, 8


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Tokens that choose two experts of one half of the experts each, and their loads."""
    random = np.random.default_rng(0)
    half = random.integers(0, 2, (600, LAYERS, 1)) * 4
    choices = half + random.permuted(np.tile(np.arange(4), (600, LAYERS, 1)), axis=2)[:, :, :2]
    shuffle = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # friends lie apart in the placement that engines start with
    choices = shuffle[choices]
    np.save(tmp_path / "choices.npy", choices)
    np.save(tmp_path / "load.npy", np.stack([np.bincount(choices[:, layer].reshape(-1)) for layer in range(LAYERS)]))
    pairs = np.zeros((LAYERS, EXPERTS, EXPERTS))
    for layer in range(LAYERS):
        np.add.at(pairs[layer], (choices[:, layer, 0], choices[:, layer, 1]), 1)
    np.save(tmp_path / "pairs.npy", pairs + pairs.transpose(0, 2, 1))
    return tmp_path


def plan(files: Path, *words: str) -> int:
    common = ("--load", str(files / "load.npy"), "--ranks", "4", "--slots-per-rank", "2", "--from-nothing")
    return run(["plan", *common, "--max-imbalance", "1.5", *words])


def test_friends_share_a_node_and_the_page_says_how_many_nodes_a_token_visits(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(files, "--nodes", "2", "--together", str(files / "choices.npy")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"nodes 1\.000 a token and layer, before 1\.\d+; 100\.0% of the pairs of its experts on one node", said)
    assert plan(files, "--nodes", "2", "--together", str(files / "pairs.npy")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"nodes 1\.00 to 1\.00 a token and layer, before", said)


def test_document_has_the_visits_and_says_what_was_asked(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, exact in (("choices.npy", True), ("pairs.npy", False)):
        assert plan(files, "--nodes", "2", "--together", str(files / name), "--output", "json") == 0
        document = json.loads(capsys.readouterr().out)
        visits = document["node_visits"]
        assert visits["planned"]["pair_share"] == pytest.approx(1.0)
        assert visits["before"]["pair_share"] < 0.9
        assert (visits["planned"]["exact"] is not None) == exact
        assert document["asked"]["together"] == "given"
    assert plan(files, "--nodes", "2", "--output", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["node_visits"], document["asked"]["together"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--together", "choices.npy"), "--nodes N, 2 or more"),
        (("--nodes", "2", "--together", "none.npy"), "there is no file"),
        (("--nodes", "2", "--together", "load.npy"), "give pairs, numbers of shape (layers, experts, experts) = (2, 8, 8)"),
    ],
)
def test_mistakes_are_said_in_one_sentence(
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(files)
    assert plan(files, *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_pairs_are_for_a_plan_from_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--together", str(files / "pairs.npy"), "-d", "x", "--planner", "localhost:1"]) == 2
    assert "--together: for a plan from a file; give --load FILE too" in " ".join(capsys.readouterr().err.split())
