"""A sweep so small that a trial takes a moment, and models that go wrong on purpose in one rank of a running trial.
Ranks import this module by its name: the launcher hands them this process's import path."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from powersgd_lab import settings
from powersgd_lab.datasets.base import Data
from powersgd_lab.datasets.base import Split
from powersgd_lab.models.mlp import MLP
from powersgd_lab.training import preflight


HANG_SECONDS = 1000


def sweep(*, model=None, dataset=None, optimizer=None, launcher=None, powersgd=None, metric=None, **trainer):
    """A sweep of an MLP on noise; keyword arguments replace parts of it, those of the trainer are given directly."""
    chosen = {"steps": 12, "batch_size": 8, "eval_steps": 6, "warmup_steps": 2, "checkpoint_seconds": None} | trainer
    return settings.Sweep(
        study="tiny",
        model=model or settings.Mlp(name="mlp", _target_="powersgd_lab.models.mlp.MLP", hidden=[32]),
        dataset=dataset or noise(),
        optimizer=optimizer or settings.Sgd(_target_="torch.optim.SGD", lr=0.05),
        trainer=settings.Trainer(metric=metric, **chosen),
        launcher=replace(launcher or settings.Launcher(), device=settings.Device.cpu, threads=1, grace=1.0),
        powersgd=powersgd or settings.PowerSGD(hook=settings.Hook.off),
    )


def noise(train_samples=256, validation_samples=65):
    return settings.RandomData(
        name="random",
        _target_="powersgd_lab.datasets.random.random_data",
        train_samples=train_samples,
        validation_samples=validation_samples,
        channels=1,
        height=8,
        width=8,
    )


def own_model(name, **args):
    return settings.OwnModel(name="own", _target_=f"tiny.{name}", args=args)


def misbehaving(how, at=5):
    return own_model("Misbehaving", how=how, at=at)


def trial_of(asked, seed=0):
    return preflight.make_trial(asked, preflight.prepare(asked), asked.powersgd, seed)


def finish(running, seconds=60.0):
    deadline = time.monotonic() + seconds
    while (outcome := running.poll()) is None:
        assert time.monotonic() < deadline, "the trial does not end"
        time.sleep(0.005)
    return outcome


def run(server, directory, asked, seed=0):
    return finish(server.launch(directory, trial_of(asked, seed)))


def complete(server, directory, asked, seed=0):
    """The result of a trial that must complete."""
    outcome = run(server, directory, asked, seed)
    assert outcome.state == "complete", (directory / "error.txt").read_text()
    return outcome.result


def events(directory, kind):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what is waited for does not come"
        time.sleep(0.01)


def processes_with(mark):
    """Ids of the live processes, zombies aside, that have the `mark` among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if mark.encode() in arguments:
            found.append(int(entry.name))
    return found


def processes_of(controller):
    """Ids of the fork server that the process `controller` started, and of its ranks: they carry its id."""
    return [pid for pid in processes_with("powersgd_lab.training.server") if pid in processes_with(str(controller))]


def language(data_dir=None):
    """A language task of 9 tokens: each sample counts up from its own start."""
    start = torch.arange(64)[:, None]
    inputs, targets = ((start + torch.arange(5) + shift) % 9 for shift in (0, 1))
    split = Split(inputs.to(torch.uint8), targets.to(torch.uint8))
    return Data("language", split, Split(split.inputs[:7], split.targets[:7]), {"vocabulary": 9, "context": 5})


class Table(torch.nn.Module):
    """A bigram model."""

    def __init__(self, vocabulary):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens):
        return self.table(tokens)


class Normed(torch.nn.Module):
    """Batch norm, whose buffers differ between ranks while they train."""

    def __init__(self, channels, height, width, classes):
        super().__init__()
        size = channels * height * width
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(size, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, classes)
        )

    def forward(self, images):
        return self.layers(images)


class Misbehaving(MLP):
    """Does `how` in rank 1 of a trial at its forward pass number `at`."""

    def __init__(self, how, at, channels, height, width, classes):
        super().__init__([8], channels, height, width, classes)
        self._how, self._left = how, at

    def forward(self, images):
        if dist.is_initialized():  # not in the check before the trial
            self._left -= 1
            if self._how == "slow":
                time.sleep(0.05)
            elif self._left == 0 and dist.get_rank() == 1:
                getattr(self, self._how)()
        return super().forward(images)

    def raises(self):
        raise RuntimeError("on purpose,\nin two lines")

    def leaves(self):
        sys.exit("had enough")

    def dies(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def vanishes(self):
        print("last words", flush=True)
        os._exit(7)

    def hangs(self):
        time.sleep(HANG_SECONDS)

    def hangs_deaf(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(HANG_SECONDS)

    def drifts(self):
        with torch.no_grad():
            self.layers[-1].bias += 1e-3

    def leaves_a_child(self):
        """Named after the controller, whose id the fork server was given."""
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_SECONDS})", f"child-of-{sys.argv[-1]}"])

    def starts_a_child(self):
        self.leaves_a_child()
        self.hangs()
