"""recommendation.yaml: the study's verdict with its evidence, and a snippet to paste into a training script.
For people to read and programs to load, so plain values and one sentence."""

from pathlib import Path
from typing import Any

import yaml

from powersgd_lab import statistics
from powersgd_lab import study
from powersgd_lab.report import files
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD
from powersgd_lab.statistics import Point
from powersgd_lab.study import Record


OURS = "powersgd_lab"
PYTORCHS = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"

COMPRESSED = '''\
from {source} import PowerSGDState
from {source} import {hook}


def register(ddp_model, process_group=None):
    """Call register(ddp_model) once on every rank, after wrapping the model in DistributedDataParallel and before the
    first backward pass. Returns the state."""
    state = PowerSGDState(
        process_group,
{arguments}
    )
    ddp_model.register_comm_hook(state, {hook})
    return state
'''

SIXTEEN_BIT = '''\
import torch
from powersgd_lab.hook.plain import AllReduceState
from powersgd_lab.hook.plain import allreduce_hook


def register(ddp_model, process_group=None):
    """Call register(ddp_model) once on every rank, after wrapping the model in DistributedDataParallel and before the
    first backward pass. Returns the state."""
    state = AllReduceState(process_group, torch.{dtype})
    ddp_model.register_comm_hook(state, allreduce_hook)
    return state
'''

PLAIN = '''\
def register(ddp_model, process_group=None):
    """Nothing to register: DistributedDataParallel without a hook is what the study recommends."""
'''


def recommendation(record: Record, points: list[Point]) -> dict[str, Any]:
    """The content of recommendation.yaml. `setting`, evidence and `snippet` are those of what to train with: a PowerSGD
    setting (use) or the cheapest satisfactory baseline (do_not_use); None when undecided."""
    sweep, search = record.sweep, record.sweep["configuration"]["search"]
    baseline, direction = search["baselines"][0], sweep["metric"]["direction"]
    found = statistics.recommend(points, baseline=baseline, direction=direction)
    content = {
        "study": sweep["configuration"]["study"],
        "verdict": found["verdict"],
        "reason": found["reason"],
        "decided_by": "mean" if search["confidence"] is None else f"{100 * search['confidence']:.4g} % interval",
        "tolerance": {"asked": search["tolerance"], "in_metric_units": points[0]["tolerance"] if points else None},
    }
    if found["seeds_needed"] is not None:
        content["seeds_that_may_settle_it"] = found["seeds_needed"]
    point = found["point"]
    if point is None:
        return content | {"setting": None, "snippet": None}
    reference = next(p for p in points if p["setting"] == baseline)
    setting = _setting(record, point)
    return content | {
        "setting_key": point["setting"],
        "setting": _plain_setting(setting),
        "metric": sweep["metric"] | {"mean": point["metric"], "std": point["metric_std"], "n": point["n"]},
        "baseline": {"setting": baseline, "mean": reference["metric"], "std": reference["metric_std"]}
        | {"n": reference["n"], "payload_bytes": reference["payload_bytes"]},
        "difference_to_baseline": {
            "mean": point["difference"],
            "low": point["difference_low"],
            "high": point["difference_high"],
            "confidence": point["confidence"],
        },
        "compression_ratio": {"step": point["compression_ratio_step"], "run": point["compression_ratio_run"]},
        "payload_bytes": point["payload_bytes"],
        "snippet": snippet(setting, sweep["steps"]),
    }


def snippet(setting: PowerSGD, steps: int) -> str:
    """Python source that defines `register(ddp_model, process_group=None)` for a setting whose start is in steps.

    `steps` are those of a run of the study, of which the start is a part."""
    if setting.hook is Hook.off:
        return PLAIN
    if not setting.hook.compresses:
        return SIXTEEN_BIT.format(dtype={Hook.fp16: "float16", Hook.bf16: "bfloat16"}[setting.hook])
    arguments = {key: value for key, value in _plain_setting(setting).items() if key not in ("hook", "start_fraction")}
    start = setting.start_powerSGD_iter
    assert start is not None
    comments = {"start_powerSGD_iter": f"  # {start / steps:.0%} of the study's {steps} steps: scale it to your run's"}
    return COMPRESSED.format(
        source=PYTORCHS if setting.hook is Hook.torch else OURS,
        hook="batched_powerSGD_hook" if setting.hook is Hook.batched else "powerSGD_hook",
        arguments="\n".join(f"        {key}={value!r},{comments.get(key, '')}" for key, value in arguments.items()),
    )


def write(record: Record, points: list[Point], folder: Path) -> Path:
    """recommendation.yaml in `folder`, replaced whole; returns its path."""
    text = yaml.dump(
        _rounded(recommendation(record, points)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return files.replace(folder / "recommendation.yaml", text.encode())


def _rounded(value: Any) -> Any:
    """Seven digits are enough to read; points.csv has all of them."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, float):
        return round(value) if value.is_integer() and abs(value) >= 1e6 else float(f"{value:.7g}")
    return value


def _setting(record: Record, point: Point) -> PowerSGD:
    return study.setting_of(next(row for row in record.rows if row["setting"] == point["setting"]))


def _plain_setting(setting: PowerSGD) -> dict[str, Any]:
    """Every documented argument by its own name; a baseline has none but its hook."""
    values = {key: getattr(setting, key) for key in PowerSGD.__dataclass_fields__} | {"hook": setting.hook.name}
    return values if setting.hook.compresses else {"hook": setting.hook.name}


class _Dumper(yaml.SafeDumper):
    """The safe dumper, with text of several lines as a block that can be read and copied."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)
