"""A made-up study on disk, written by the record's own functions: what a sweep leaves behind, without training."""

import numpy as np
import pytest

from powersgd_lab import settings
from powersgd_lab import study
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD


STEPS, PARAMETERS = 400, 600_000
RATIOS = {1: 90.0, 2: 55.0, 4: 30.0, 8: 16.0, 16: 8.0, 32: 4.5, 64: 2.4, 128: 1.3}


def sweep_of(name="made_up", **search):
    node = {"tolerance": "5%", "confidence": None, "baselines": ["off", "bf16"], "seeds": 2} | search
    configuration = {"study": name, "search": node, "network": {"link": "1gbit"}, "launcher": {"world_size": 2}}
    configuration |= {"model": {"name": "gpt"}, "dataset": {"name": "python_source"}}
    metric = {"name": "perplexity", "direction": "min"}
    sizes = {"steps": STEPS, "parameters": PARAMETERS, "gradient_bytes": 4 * PARAMETERS}
    return {"configuration": configuration, "metric": metric} | sizes


def result_of(setting, metric):
    """What a trial's ranks would report, with the bytes that its setting implies."""
    start = setting.start_powerSGD_iter if setting.hook.compresses else STEPS
    ratio = RATIOS[setting.matrix_approximation_rank] if setting.hook.compresses else 1
    ratio = 2 if setting.hook in (Hook.bf16, Hook.fp16) else ratio
    before = 0 if setting.hook in (Hook.bf16, Hook.fp16) else start
    payload = round(4 * PARAMETERS * (before + (STEPS - before) / ratio))
    times = {"seconds": 30.0, "step_seconds": 0.07, "compute_seconds": 0.05, "compress_seconds": 0.01}
    facts = {"metric": metric, "loss": metric / 3.5, "payload_bytes": payload, "wire_bytes": payload}
    ratios = {"compression_ratio_step": float(ratio), "compression_ratio_run": 4 * PARAMETERS * STEPS / payload}
    more = {"communicate_seconds": 0.01, "contended": False, "control_bytes": 64, "allreduces_step": 2}
    return times | facts | ratios | more | {"metric.perplexity": metric, "metric_name": "perplexity"}


def write_study(directory, trials, **search):
    """`trials`: (PowerSGD setting, seed, metric or the state `pruned`, `fail` or `waiting`)."""
    directory.mkdir(parents=True)
    study.write_sweep(directory, sweep_of(directory.name, **search))
    opened = study.open_study(directory)
    for setting, seed, metric in trials:
        resolved = settings.resolved(setting, STEPS, 20)
        opened.enqueue_trial({}, user_attrs=study.facts_of(resolved, seed, 2, STEPS))
        if metric == "waiting":
            continue
        trial = opened.ask()
        if isinstance(metric, str):
            trial.set_user_attr("reason", "diverged" if metric == "pruned" else "RuntimeError: boom")
            opened.tell(trial, state=study.TrialState.PRUNED if metric == "pruned" else study.TrialState.FAIL)
            continue
        result = result_of(resolved, metric)
        for key, value in result.items():
            trial.set_user_attr(key, value)
        opened.tell(trial, [metric, result["payload_bytes"]])
    return directory


def trial_list(metrics, seeds=2, **extra):
    """Settings times seeds from {(hook, rank, start fraction): metric}; seeds scatter by 0.05 around it."""
    found, random = [], np.random.default_rng(0)
    for (hook, rank, fraction), metric in metrics.items():
        keys = {"matrix_approximation_rank": rank, "start_fraction": fraction} if hook.compresses else {}
        for seed in range(seeds):
            value = metric if isinstance(metric, str) else metric + random.normal(0, 0.05)
            found.append((PowerSGD(hook=hook, **keys, **(extra if hook.compresses else {})), seed, value))
    return found


BASELINES = {(Hook.off, None, None): 6.75, (Hook.bf16, None, None): 6.76}
EARLY = {(Hook.layerwise, rank, 0.1): metric for rank, metric in ((1, 9.5), (4, 7.9), (16, 7.1))}
LATE = {(Hook.layerwise, rank, 0.3): metric for rank, metric in ((1, 8.6), (4, 7.5), (16, 6.95))}


@pytest.fixture
def made_up(tmp_path):
    """A finished study that recommends rank 16 from step 120 on, within 5 % of the baseline."""
    return write_study(tmp_path / "made_up", trial_list(BASELINES | EARLY | LATE))


@pytest.fixture
def write(tmp_path):
    """Writes a study under a name from {(hook, rank, start fraction): metric}."""

    def make(name, metrics, *, seeds=2, extra=None, **search):
        return write_study(tmp_path / name, trial_list(metrics, seeds, **(extra or {})), **search)

    return make
