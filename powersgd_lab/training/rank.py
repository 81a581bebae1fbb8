"""One rank of a trial, from the process group to the result: the same entry under the fork server and under torchrun.
A rank that fails leaves its error in the trial's directory before it goes, so that the first cause can be told."""

import os
import random
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from powersgd_lab import settings
from powersgd_lab.network.cost import ring_wire_bytes
from powersgd_lab.settings import Backend
from powersgd_lab.settings import Hook
from powersgd_lab.settings import Trial
from powersgd_lab.training import assembly
from powersgd_lab.training import communication
from powersgd_lab.training import failure
from powersgd_lab.training import journal
from powersgd_lab.training.agreement import Agreement
from powersgd_lab.training.agreement import sha256_of
from powersgd_lab.training.checkpoint import Checkpoints
from powersgd_lab.training.journal import Journal
from powersgd_lab.training.loop import DIVERGED
from powersgd_lab.training.loop import Ending
from powersgd_lab.training.loop import Loop
from powersgd_lab.training.meter import Meter
from powersgd_lab.training.meter import typical
from powersgd_lab.training.sharding import Shards
from powersgd_lab.training.sharding import rank_seed
from powersgd_lab.training.slots import cores
from powersgd_lab.training.slots import local_ranks
from powersgd_lab.training.tasks import task_of


# A rank waits so long for the others in one collective before it fails. PyTorch's own hook can leave ranks waiting
# for each other, so its trials find out sooner.
PATIENCE = timedelta(minutes=30)
PATIENCE_WITH_PYTORCHS_HOOK = timedelta(minutes=2)


def run(
    directory: Path, rank: int, world_size: int, rendezvous: Path | None, launched: float, resume: bool = True
) -> None:
    """Train the trial in `directory`/config.json as one of its ranks.

    rendezvous: the file through which the ranks find each other; None reads MASTER_ADDR and MASTER_PORT.
    launched: the time (time.time()) at which the trial was launched, from which its first step is counted.
    resume: go on from the checkpoint in the directory, if there is one.

    Whatever is raised is written to the rank's error file, then raised."""
    try:
        trial = settings.read_trial(directory / journal.CONFIG)
        _join(trial, rank, world_size, rendezvous)
        _train(trial, directory, launched, resume)
    except BaseException as error:
        failure.write(directory, rank, error)
        raise
    dist.destroy_process_group()


def run_under_torchrun(directory: Path) -> None:
    """`run` as one process of torchrun, which says which rank this is; output stays where torchrun puts it.

    It begins anew: what the directory holds may be of another trial, or of another number of ranks."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        journal.clear(directory, keep_progress=False)
    run(directory, rank, int(os.environ["WORLD_SIZE"]), None, time.time(), resume=False)


def _join(trial: Trial, rank: int, world_size: int, rendezvous: Path | None) -> None:
    if world_size != trial.launcher.world_size:
        raise ValueError(f"launcher.world_size={trial.launcher.world_size}, but {world_size} ranks were started")
    backend = trial.launcher.backend
    assert backend is not Backend.auto, "a trial's backend is resolved before it is made"
    store = None if rendezvous is None else FileStore(str(rendezvous), world_size)
    patience = PATIENCE_WITH_PYTORCHS_HOOK if trial.powersgd.hook is Hook.torch else PATIENCE
    dist.init_process_group(
        backend.name,
        init_method="env://" if store is None else None,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )


def _train(trial: Trial, directory: Path, launched: float, resume: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = assembly.rank_device(trial.launcher.device, int(os.environ.get("LOCAL_RANK", rank)))
    meter = Meter(device)
    began = time.perf_counter()
    data = assembly.make_data(trial.dataset)
    if data.record.get("sha256") != trial.data_sha256:
        raise RuntimeError("the data have changed since the sweep began: its trials could not be compared")
    loaded = time.perf_counter()
    model = assembly.make_model(trial.model, data, trial.seed).to(device)
    optimizer = assembly.make_optimizer(trial.optimizer, model, trial.trainer.decay_norms_and_biases)
    distributed, hook_state = assembly.distribute(model, trial, device, meter)
    own = rank_seed(trial.seed, rank)
    torch.manual_seed(own)
    random.seed(own)  # forked ranks begin with one state of Python's and numpy's streams
    np.random.seed(own % 2**32)
    trainer = trial.trainer
    shards = Shards(len(data.train), trainer.batch_size, trainer.accumulation, rank, world_size, trial.seed)
    agreement = Agreement(device, meter)
    checkpoints = Checkpoints(directory, rank)
    saved = checkpoints.load() if resume else None
    done = 0 if saved is None else int(saved["steps"])
    log = Journal(directory, rank, launched, done)
    cap = communication.bucket_cap_mb(trial, trial.launcher.backend)
    if cap != trainer.ddp.bucket_cap_mb:
        print(f"one bucket (bucket_cap_mb={cap:g}): PyTorch's hook is not safe with several on gloo", flush=True)
    log.write("start", step=done, launch_seconds=time.time() - launched, bucket_cap_mb=cap)
    built = time.perf_counter()
    with ExitStack() as held:
        held.enter_context(communication.metered_all_reduce(trial.powersgd, meter))
        loop = Loop(trial, data, distributed, hook_state, optimizer, shards, device, agreement, meter, log, checkpoints)
        ending = loop.run(saved)
    agreement.broadcast_buffers(model)
    start = trial.powersgd.start_powerSGD_iter or 0 if trial.powersgd.hook.compresses else 0
    times = typical(meter.times, start)
    summary = {
        "parameter_sha256": sha256_of(model.parameters()),
        "factor_sha256": sha256_of(communication.factors(hook_state, distributed)),
        "payload": dict(meter.payload),
        "seconds": ending.seconds,
        "evaluation_seconds": ending.evaluation_seconds,
        "step_seconds": times.step,
        "compute_seconds": times.step - times.compress - times.communicate,
        "compress_seconds": times.compress,
        "communicate_seconds": times.communicate,
        "first_step_seconds": log.first_step_seconds,
        "load_seconds": loaded - began,
        "build_seconds": built - loaded,
    }
    summaries = agreement.gather(summary)
    if ending.reason != DIVERGED:  # NaNs need not have equal bits
        _refuse_drift(summaries)
    uncompressed = assembly.gradient_bytes(model)
    metric = task_of(data).metric(trainer.metric)
    log.write_result(_result(trial, ending, metric, meter, summaries, uncompressed))


def _refuse_drift(summaries: list[dict[str, Any]]) -> None:
    for what, key in (("models", "parameter_sha256"), ("factors of PowerSGD", "factor_sha256")):
        hashes = {summary[key] for summary in summaries}
        if len(hashes) > 1:
            raise RuntimeError(f"after the last step the {len(summaries)} ranks hold {len(hashes)} different {what}")
    assert all(summary["payload"] == summaries[0]["payload"] for summary in summaries), "ranks send alike"


def _result(
    trial: Trial, ending: Ending, metric: str, meter: Meter, summaries: list[dict[str, Any]], uncompressed: int
) -> dict[str, Any]:
    """result.json. Bytes are one rank's over the run; seconds are the slowest rank's; a run that did not get to its
    end has neither metric nor loss."""
    payload = sum(meter.payload.values())
    world_size = trial.launcher.world_size
    slowest = max(summaries, key=lambda summary: float(summary["step_seconds"]))
    parts = ("step_seconds", "compute_seconds", "compress_seconds", "communicate_seconds")
    latest = ("seconds", "evaluation_seconds", "first_step_seconds", "load_seconds", "build_seconds")
    others = {f"metric.{name}": value for name, value in ending.values.items() if name != "loss"}
    return {
        "state": ending.state,
        "reason": ending.reason,
        "steps": ending.steps,
        "metric_name": metric,
        "metric": ending.values.get(metric),
        "loss": ending.values.get("loss"),
        **others,
        "payload_bytes": payload,
        "wire_bytes": round(ring_wire_bytes(payload, world_size)),
        "control_bytes": meter.control_bytes,
        "compression_ratio_step": uncompressed / meter.step_payload,
        "compression_ratio_run": uncompressed * ending.steps / payload,
        "allreduces_step": meter.step_allreduces,
        **{f"payload.{kind}": size for kind, size in sorted(meter.payload.items())},
        **{name: max(summary[name] for summary in summaries) for name in latest},
        **{name: slowest[name] for name in parts},
        "contended": _contended(trial),
        "parameter_sha256": slowest["parameter_sha256"],
    }


def _contended(trial: Trial) -> bool:
    """Whether ranks shared cores, so that their seconds are not those of ranks with a machine each."""
    return local_ranks(trial.launcher) > len(cores())
