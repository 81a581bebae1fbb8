"""Does the lab work on a GPU? Two ranks sharing one over gloo, then NCCL where each rank can have its own.
Run from the repository's root: python experiments/gpu_check/run.py; it takes under ten minutes and ends with PASS."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from powersgd_lab import PowerSGDState
from powersgd_lab import powerSGD_hook


STEPS = 12
RANKS = 2


def trial(backend: str, hook: str, runs_dir: str) -> dict[str, float]:
    """One main trial on the GPU: the default model and data for 100 steps."""
    command = [sys.executable, "-m", "powersgd_lab.train", f"powersgd={hook}", f"launcher.backend={backend}"]
    options = ["launcher.device=cuda", f"launcher.world_size={RANKS}", "trainer.steps=100", f"runs_dir={runs_dir}"]
    began = time.monotonic()
    subprocess.run([*command, *options, f"study={backend}"], check=True, stdout=subprocess.DEVNULL)
    (path,) = Path(runs_dir).glob(f"train/{backend}/{hook}*/result.json")
    result: dict[str, float] = json.loads(path.read_text())
    print(
        f"{backend} {hook}: perplexity {result['metric']:.3f}, {result['compression_ratio_step']:.1f}x a step, "
        f"step {1e3 * result['step_seconds']:.1f} ms, first step after {result['first_step_seconds']:.2f} s, "
        f"{time.monotonic() - began:.0f} s in all",
        flush=True,
    )
    return result


def gradients(rank: int, folder: str, device: str, backend: str) -> None:
    """A few steps of a small model; the averaged gradients of every step are saved."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    name = f"{device}-{backend}"
    store = dist.FileStore(f"{folder}/store-{name}", RANKS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 3)).double().to(place)
    distributed = DistributedDataParallel(model, bucket_cap_mb=0.1)  # several buckets
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    distributed.register_comm_hook(state, powerSGD_hook)
    found = []
    for step in range(STEPS):
        torch.manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 64, dtype=torch.float64).to(place)
        model.zero_grad()
        distributed(inputs).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu())
    torch.save(torch.stack(found), f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


def compare(folder: str, backend: str) -> bool:
    """The hook on the GPU against the hook on the CPU, which the tests hold against the plain reference."""
    multiprocessing.spawn(gradients, (folder, "cuda", backend), nprocs=RANKS)
    on_cpu = torch.load(f"{folder}/cpu-gloo-0.pt")
    on_gpu = [torch.load(f"{folder}/cuda-{backend}-{rank}.pt") for rank in range(RANKS)]
    error = float((on_gpu[0] - on_cpu).abs().max() / on_cpu.abs().max())
    alike = torch.equal(*on_gpu)
    print(f"hook on {backend}: relative difference to the CPU {error:.1e}, ranks bitwise alike: {alike}", flush=True)
    return alike and error < 1e-9


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no GPU here")
        return 1
    print(f"{torch.cuda.get_device_name(0)} x {torch.cuda.device_count()}, torch {torch.__version__}")
    backends = ["gloo"] + (["nccl"] if torch.cuda.device_count() >= RANKS else [])
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(gradients, (folder, "cpu", "gloo"), nprocs=RANKS)
        for backend in backends:
            passed &= compare(folder, backend)
            plain = trial(backend, "off", folder)
            compressed = trial(backend, "layerwise", folder)
            passed &= compressed["compression_ratio_step"] > 10
            passed &= plain["metric"] < 50 and compressed["metric"] < 50  # far below the 128 of guessing
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
