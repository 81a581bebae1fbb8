"""The ways in which a trial goes wrong or is ended, each with real ranks: the reason is one line and names the cause.
One rank fails and the other is blocked in a collective, which must end in seconds and leave no process."""

import os
import time

import pytest
import tiny

from powersgd_lab import settings


pytestmark = pytest.mark.slow  # waits for time limits and graces to pass; test_ranks_agree.py has endings for every day


@pytest.fixture(autouse=True)
def nobody_is_left(server):
    """After each trial of this module only the fork server is there."""
    yield
    tiny.wait_for(lambda: len(tiny.processes_of(os.getpid())) == 1)
    assert tiny.processes_with(f"child-of-{os.getpid()}") == []


def run_misbehaving(server, directory, how, **trainer):
    began = time.monotonic()
    outcome = tiny.run(server, directory, tiny.sweep(model=tiny.misbehaving(how), **trainer))
    assert time.monotonic() - began < 15
    return outcome


@pytest.mark.parametrize(
    ("how", "reason", "details"),
    [
        ("raises", "RuntimeError: on purpose, in two lines", "in raises"),
        ("leaves", "SystemExit: had enough", "in leaves"),
        ("dies", "rank 1 died (signal 9)", "rank 1 died"),
        ("vanishes", "rank 1 died (exit status 7)", "last words"),
    ],
)
def test_the_first_cause_is_the_reason(how, reason, details, server, tmp_path):
    outcome = run_misbehaving(server, tmp_path, how)
    assert (outcome.state, outcome.reason, outcome.result) == ("fail", reason, {})
    error = (tmp_path / "error.txt").read_text()
    assert error.startswith("rank 1: ")
    assert details in error


def test_a_trial_that_hangs_is_ended_in_time(server, tmp_path):
    outcome = run_misbehaving(server, tmp_path, "hangs", timeout=2.0)
    assert outcome.state == "fail"
    assert outcome.reason == "timeout: not finished after 2 s (trainer.timeout)"
    assert outcome.reason in (tmp_path / "error.txt").read_text()


def test_a_rank_that_does_not_listen_is_killed(server, tmp_path):
    outcome = run_misbehaving(server, tmp_path, "hangs_deaf", timeout=2.0)
    assert outcome.reason.startswith("timeout")


def test_what_a_rank_started_ends_with_it(server, tmp_path):
    running = server.launch(tmp_path, tiny.trial_of(tiny.sweep(model=tiny.misbehaving("starts_a_child"))))
    mark = f"child-of-{os.getpid()}"
    tiny.wait_for(lambda: running.poll() is None and tiny.processes_with(mark))
    running.terminate()
    assert tiny.finish(running, 10).state == "fail"
    tiny.wait_for(lambda: not tiny.processes_with(mark))


def test_what_a_rank_left_behind_ends_with_a_trial_that_completes(server, tmp_path):
    assert run_misbehaving(server, tmp_path, "leaves_a_child").state == "complete"
    tiny.wait_for(lambda: not tiny.processes_with(f"child-of-{os.getpid()}"))


def test_different_models_on_different_ranks_fail_the_trial(server, tmp_path):
    outcome = run_misbehaving(server, tmp_path, "drifts")
    assert outcome.state == "fail"
    assert outcome.reason == "RuntimeError: after the last step the 2 ranks hold 2 different models"


def test_a_loss_that_is_not_finite_prunes(server, tmp_path):
    asked = tiny.sweep(optimizer=settings.Sgd(_target_="torch.optim.SGD", lr=1e30), steps=100, warmup_steps=0)
    outcome = tiny.run(server, tmp_path, asked)
    assert (outcome.state, outcome.reason) == ("pruned", "diverged")
    assert outcome.result["metric"] is None
    assert outcome.result["loss"] is None
    (end,) = tiny.events(tmp_path, "end")
    assert end["reason"] == "diverged"
    assert end["step"] == outcome.result["steps"] < 100
    assert tiny.events(tmp_path, "train")[-1]["loss"] is None
    assert not (tmp_path / "error.txt").exists()


def slow_trial(**launcher):
    chosen = settings.Launcher(**launcher)
    return tiny.trial_of(tiny.sweep(model=tiny.misbehaving("slow"), steps=1000, eval_steps=500, launcher=chosen))


def under_way(running, directory):
    tiny.wait_for(lambda: running.poll() is None and (directory / "metrics.jsonl").exists())
    tiny.wait_for(lambda: running.poll() is None and tiny.events(directory, "train"))


@pytest.mark.parametrize(("text", "reason"), [("it trails", "stopped: it trails"), ("", "stopped")])
def test_ranks_that_are_asked_to_stop_leave_together(text, reason, server, tmp_path):
    running = server.launch(tmp_path, slow_trial())
    under_way(running, tmp_path)
    running.ask_to_stop(text)
    outcome = tiny.finish(running, 20)
    assert (outcome.state, outcome.reason) == ("pruned", reason)
    assert 0 < outcome.result["steps"] < 1000
    assert outcome.result["payload_bytes"] > 0
    assert outcome.result["metric"] is None


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_trial_ends_when_it_is_told_to(how, server, tmp_path):
    running = server.launch(tmp_path, slow_trial())
    under_way(running, tmp_path)
    getattr(running, how)()
    outcome = tiny.finish(running, 10)
    assert outcome.state == "fail"
    assert outcome.reason.endswith("by the controller")


def test_a_trial_can_be_ended_before_its_ranks_are_up(server, tmp_path):
    running = server.launch(tmp_path, slow_trial())
    running.terminate()
    assert tiny.finish(running, 10).state == "fail"


def test_one_trial_fails_and_the_other_goes_on(server, tmp_path):
    good = server.launch(tmp_path / "good", tiny.trial_of(tiny.sweep(steps=200, eval_steps=200)))
    bad = server.launch(tmp_path / "bad", tiny.trial_of(tiny.sweep(model=tiny.misbehaving("raises"))))
    assert tiny.finish(bad).state == "fail"
    assert tiny.finish(good).state == "complete"
