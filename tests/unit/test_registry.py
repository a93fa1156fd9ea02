from __future__ import annotations

from pathlib import Path

import pytest

from eplb_service.errors import EnvironmentFault, NotFoundError, PolicyFailedError
from eplb_service.policy.registry import load_policy, policy_names


def test_own_policies_are_found_by_name() -> None:
    assert {"greedy", "ilp"} <= set(policy_names())
    assert list(policy_names()) == sorted(policy_names())
    assert load_policy("greedy").name == "greedy"
    assert load_policy("ilp").name == "ilp"


def test_unknown_policy_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(NotFoundError, match=r"no policy 'gredy'; known policies: .*greedy, ilp"):
        load_policy("gredy")


def test_policies_that_cannot_be_made_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_policies.py").write_text(
        "class Raises:\n    def __init__(self):\n        raise ValueError('no')\n\n\nclass NoPlan:\n    pass\n\n\n"
        "class NeedsMore:\n    def __init__(self):\n        import a_package_that_is_not_there\n"
    )
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[eplb.policies]\nodd-raises = odd_policies:Raises\nodd-no-plan = odd_policies:NoPlan\n"
        "odd-needs = odd_policies:NeedsMore\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PolicyFailedError, match="could not be made: ValueError: no"):
        load_policy("odd-raises")
    with pytest.raises(PolicyFailedError, match="has no plan method"):
        load_policy("odd-no-plan")
    with pytest.raises(EnvironmentFault, match=r"a_package_that_is_not_there.*install eplb-service\[planner\]"):
        load_policy("odd-needs")
