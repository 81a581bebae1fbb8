"""A study's directory: made for a new study, or recognized as the same study, or refused with the keys that differ.
`sweep.json` in it says what the study is: the configuration, the data, versions and machine."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from powersgd_lab import settings
from powersgd_lab import study
from powersgd_lab.search.strategies import Strategy
from powersgd_lab.training.preflight import Prepared


@contextmanager
def claimed(sweep: settings.Sweep, described: dict[str, Any]) -> Iterator[Path]:
    """The study's directory, held by this process, with its sweep.json in it.

    Raises ValueError when it cannot be written, holds another study, or is held by another process."""
    directory = Path(sweep.runs_dir) / sweep.study
    if (directory / "sweep.json").exists():
        recorded = study.read_sweep(directory)
        if "identity" not in recorded:
            raise ValueError(f"{directory / 'sweep.json'} is broken: it does not say which study this is")
        _refuse_another(directory, recorded["identity"], described["identity"])
        # A study may grow: its seeds, grid and free keys are those of the latest run, its beginning stays.
        described = described | {"started": recorded["started"]}
    with ExitStack() as held:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(study.controlled(directory))
            study.write_sweep(directory, described)
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            raise ValueError(f"runs_dir={sweep.runs_dir} cannot be written: {reason}") from None
        yield directory


def describe(sweep: settings.Sweep, prepared: Prepared, strategy: Strategy, command: str) -> dict[str, Any]:
    """sweep.json: what the report says of a study, and in `identity` what makes it this study and no other."""
    ignored = {f"powersgd.{key}" for key in strategy.searched}
    identity = {key: value for key, value in settings.identity(sweep).items() if key not in ignored}
    identity |= {f"data.{key}": value for key, value in prepared.data.items()}
    # What `auto` stood for, so that saying it makes no other study.
    identity |= {"launcher.device": prepared.device, "launcher.backend": prepared.backend}
    described = {
        "configuration": settings.plain(sweep),
        "identity": identity,
        "metric": {"name": prepared.metric, "direction": prepared.direction},
        "steps": prepared.steps,
        "steps_per_epoch": prepared.steps_per_epoch,
        "parameters": prepared.parameters,
        "gradient_bytes": prepared.gradient_bytes,
        "data": dict(prepared.data),
        "command": command,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "git_commit": _git_commit(),
        "versions": {name: version(name) for name in ("powersgd_lab", "torch", "optuna", "numpy")}
        | {"python": platform.python_version()},
        "machine": _machine(),
    }
    try:
        plain: dict[str, Any] = json.loads(json.dumps(described))  # as it will be read back and compared
    except TypeError as error:
        raise ValueError(f"the data set's record must be made of JSON values: {error}") from None
    return plain


def _refuse_another(directory: Path, recorded: dict[str, Any], asked: dict[str, Any]) -> None:
    differing = [key for key in {**recorded, **asked} if recorded.get(key) != asked.get(key)]
    if differing:
        shown = "; ".join(f"{key} is {recorded.get(key)!r} there, {asked.get(key)!r} here" for key in differing[:6])
        more = f"; and {len(differing) - 6} more" if len(differing) > 6 else ""
        raise ValueError(f"{directory} holds another study: {shown}{more}. Choose another study=NAME")


def _git_commit() -> str | None:
    """The commit of the working directory's repository, if it is one: the user's code, which trials import."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
