"""The demo's supervisor and oracle under a terminal's Ctrl-C, which goes to every process of its group."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.oracle import OracleProcess, Served
from demo.processes import Supervised
from eplb_service.errors import EnvironmentFault

pytestmark = pytest.mark.process

INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from demo.processes import Supervised

folder = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.SIG_IGN)
part = Supervised("planner", ["serve", "--port=0", "--metrics-port=0", f"--data-dir={folder}/data",
                  f"--ready-file={folder}/ready"], folder / "ready", folder / "log")
part.start()
part.wait_ready()
os.killpg(0, signal.SIGINT)
print("revived" if part.revive() else "alive", flush=True)
part.stop()
"""


def test_ctrl_c_in_the_terminal_does_not_end_what_is_supervised(tmp_path: Path) -> None:
    environment = {key: text for key, text in os.environ.items() if not key.startswith("EPLB_")}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        start_new_session=True,
        env=environment,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("alive\n", 0), done.stderr
    log = (tmp_path / "log").read_text()
    assert "planner.stopped" in log  # by SIGTERM at the end, in order


def test_a_part_that_dies_before_it_is_ready_is_told_with_its_last_words(tmp_path: Path) -> None:
    part = Supervised("planner", ["serve", "--gate-min-coverge", "1"], tmp_path / "ready", tmp_path / "log")
    part.start()
    with pytest.raises(EnvironmentFault, match="planner ended with exit code 2 before it was ready:\n  eplb: no such option"):
        part.wait_ready()
    assert part.revive()
    assert part.restarts == 1
    part.stop()


def test_oracle_judges_on_after_ctrl_c_and_its_death_is_told() -> None:
    oracle = OracleProcess()
    oracle.start()
    try:
        oracle.submit(Served(1, "code", b"import os", (1, 2), (0, 1), ((0,), (0,))))
        oracle_process = next(child for child in multiprocessing.active_children() if child.name == "oracle")
        wait_until_judged(oracle)
        assert oracle_process.pid is not None
        os.kill(oracle_process.pid, signal.SIGINT)
        oracle.submit(Served(2, "code", b"import re", (), (), ()))
        oracle.finish(60)
        assert [judged.request_id for judged in oracle.judged] == [1, 2]
        assert oracle.tokens_checked == 2
    finally:
        oracle.kill()
    oracle.submit(Served(3, "code", b"x", (1,), (0,), ((0,),)))
    with pytest.raises(EnvironmentFault, match=r"the oracle ended \(exit code 0\) with 1 requests unjudged"):
        oracle.collect()


def test_requests_that_a_killed_oracle_left_do_not_hold_up_the_end_of_the_process() -> None:
    """More than a pipe takes: the thread that writes them would wait for a reader for ever."""
    program = (
        "from demo.oracle import OracleProcess, Served\n"
        "if __name__ == '__main__':\n"
        "    oracle = OracleProcess()\n"
        "    for number in range(200):\n"
        "        oracle.submit(Served(number, 'code', b'x' * 4096, (1,), (0,), ((0,),)))\n"
        "    oracle.kill()\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=30, check=True)


def wait_until_judged(oracle: OracleProcess) -> None:
    deadline = time.monotonic() + 60
    while oracle.waiting:
        assert time.monotonic() < deadline
        oracle.collect()
        time.sleep(0.02)
