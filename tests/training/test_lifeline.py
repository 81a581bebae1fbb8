"""Nothing outlives its parent: not the fork server its controller, not the ranks their server, killed without warning.
Real processes are killed and real processes counted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from powersgd_lab.training.launch import ForkServer


pytestmark = pytest.mark.slow  # each test starts a server of its own


CONTROLLER = """
import sys, time
from pathlib import Path
import tiny
from powersgd_lab.training.launch import ForkServer
trial = tiny.trial_of(tiny.sweep(model=tiny.misbehaving("slow"), steps=1000, eval_steps=500))
with ForkServer() as server:
    running = server.launch(Path(sys.argv[1]), trial)
    while True:
        running.poll()
        time.sleep(0.01)
"""


def has_trained(directory):
    return (directory / "metrics.jsonl").exists() and bool(tiny.events(directory, "train"))


def slow_trial():
    return tiny.trial_of(tiny.sweep(model=tiny.misbehaving("slow"), steps=1000, eval_steps=500))


def server_of(controller):
    (server,) = [pid for pid in tiny.processes_of(controller) if parent(pid) == controller]
    return server


def parent(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid:")))


def test_a_killed_controller_takes_its_server_and_ranks_with_it(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path)], env=environment) as controller:
        tiny.wait_for(lambda: has_trained(tmp_path))
        assert len(tiny.processes_of(controller.pid)) == 3
        controller.kill()
    tiny.wait_for(lambda: not tiny.processes_of(controller.pid), 10)


def test_a_killed_server_takes_its_ranks_with_it_and_another_one_takes_over(tmp_path):
    with ForkServer() as forks:
        running = forks.launch(tmp_path / "lost", slow_trial())
        tiny.wait_for(lambda: running.poll() is None and has_trained(tmp_path / "lost"))
        os.kill(server_of(os.getpid()), signal.SIGKILL)
        outcome = tiny.finish(running, 10)
        assert (outcome.state, outcome.reason) == ("fail", "the fork server died, and its ranks with it")
        tiny.wait_for(lambda: not tiny.processes_of(os.getpid()), 10)
        tiny.complete(forks, tmp_path / "next", tiny.sweep())
    assert tiny.processes_of(os.getpid()) == []


def test_leaving_the_server_ends_its_trials(tmp_path):
    with ForkServer() as forks:
        running = forks.launch(tmp_path, slow_trial())
        tiny.wait_for(lambda: running.poll() is None and has_trained(tmp_path))
    tiny.wait_for(lambda: not tiny.processes_of(os.getpid()), 10)


def test_the_server_has_one_thread_to_fork_with():
    with ForkServer():
        tasks = Path(f"/proc/{server_of(os.getpid())}/task")
        assert len(list(tasks.iterdir())) == 1
