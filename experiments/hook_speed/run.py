"""How long one hook step takes: ours against PyTorch's in the same ranks, and real DDP at default buckets.
Run `python experiments/hook_speed/run.py`; it rewrites the tables in this folder's README.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shapes import MODELS
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch

from powersgd_lab import hook as ours


MARK = "<!-- tables -->"


class Bucket:
    """One bucket with everything in it, as DDP hands it to a hook."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self._parameters = [torch.empty(shape) for shape in shapes]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._buffer = torch.empty(sum(self._sizes))

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        pieces = self._buffer.split(self._sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def hook_steps(rank: int, options: argparse.Namespace) -> list[str]:
    lines = ["| model | approximation rank | ours, ms | PyTorch's, ms | ratio | copies | n |", "|" + "---|" * 7]
    for name in options.models:
        bucket = Bucket(MODELS[name]())
        gradient = torch.randn_like(bucket.buffer(), generator=torch.Generator().manual_seed(rank))
        spare = torch.empty_like(gradient)
        for r in options.ranks:
            hooks = []
            for module in (ours, pytorch):
                state = module.PowerSGDState(None, r, start_powerSGD_iter=2)
                state.iter = 2
                hooks.append((state, module.powerSGD_hook))
            seconds: list[list[float]] = [[], [], []]
            ended = time.perf_counter() + options.seconds
            enough = torch.zeros(1)
            while not enough.item():
                for which, (state, hook) in enumerate(hooks):
                    bucket.buffer().copy_(gradient)
                    seconds[which].append(timed(lambda s=state, h=hook, b=bucket: h(s, b).wait()))
                seconds[2].append(timed(lambda g=gradient, to=spare: to.copy_(g)))
                # Both ranks must stop after the same round.
                enough.fill_(float(time.perf_counter() > ended))
                dist.all_reduce(enough)
            mine, theirs, copy = (statistics.median(s[2:]) * 1e3 for s in seconds)
            spread = [quartiles(s[2:]) for s in seconds]
            lines.append(
                f"| {name} | {r} | {mine:.2f} ({spread[0]}) | {theirs:.2f} ({spread[1]}) | {theirs / mine:.1f} "
                f"| {mine / copy:.1f} of {copy:.2f} ms | {len(seconds[0]) - 2} |"
            )
    return lines


def processor() -> str:
    """The processor's name, where Linux tells it."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def quartiles(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "one run"
    low, _, high = statistics.quantiles(seconds, n=4)
    return f"{low * 1e3:.2f} to {high * 1e3:.2f}"


class Products(torch.nn.Module):
    """A model with the given parameters whose backward pass costs little more than its gradients."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]).sum()


def ddp_steps(rank: int, options: argparse.Namespace) -> list[str]:
    world_size = dist.get_world_size()
    kinds: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
        "off": (ours.AllReduceState, ours.allreduce_hook, {}),
        "bf16": (lambda: ours.AllReduceState(dtype=torch.bfloat16), ours.allreduce_hook, {}),
        "ours, rank 1": (lambda: ours.PowerSGDState(None, 1, 2), ours.powerSGD_hook, {}),
        "ours, rank 1, one bucket": (
            lambda: ours.PowerSGDState(None, 1, 2),
            ours.powerSGD_hook,
            {"bucket_cap_mb": 2000},
        ),
        "ours, rank 4": (lambda: ours.PowerSGDState(None, 4, 2), ours.powerSGD_hook, {}),
        "PyTorch's, rank 1, one bucket": (
            lambda: pytorch.PowerSGDState(None, 1, 2),
            pytorch.powerSGD_hook,
            {"bucket_cap_mb": 2000},
        ),
    }
    models, times = {}, {}
    shapes = MODELS["resnet18"]()
    inputs = [torch.randn(shape) for shape in shapes]
    for kind, (make, hook, extra) in kinds.items():
        models[kind] = torch.nn.parallel.DistributedDataParallel(Products(shapes), **extra)
        models[kind].register_comm_hook(make(), hook)
        times[kind] = []
    for turn in range(options.rounds + 4):
        for kind, model in models.items():
            model.zero_grad()
            loss = model(inputs)
            seconds = timed(loss.backward)
            if turn >= 4:
                times[kind].append(seconds)
    return [
        f"| {world_size} | {kind} | {statistics.median(s) * 1e3:.1f} ({quartiles(s)}) | {len(s)} |"
        for kind, s in times.items()
    ]


def serve(rank: int, world_size: int, store: str, part: Any, options: argparse.Namespace, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    lines = part(rank, options)
    if rank == 0:
        results.put(lines)
    dist.barrier()


def spread_out(world_size: int, part: Any, options: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        arguments = (world_size, f"{directory}/store", part, options, results)
        mp.spawn(serve, arguments, nprocs=world_size)
        lines: list[str] = results.get()
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="for each model and rank")
    parser.add_argument("--rounds", type=int, default=20, help="of real DDP steps")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dry", action="store_true", help="print the tables, leave the README alone")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    table = [
        "### One hook step, one bucket",
        "",
        *spread_out(2, hook_steps, options),
        "",
        "### Backward pass of ResNet-18's shapes under DDP, default buckets unless it says one bucket",
        "",
        "| W | hook | ms | n |",
        "|---|---|---|---|",
        *spread_out(2, ddp_steps, options),
        *spread_out(4, ddp_steps, options),
    ]
    machine = (
        f"Machine: {os.cpu_count()} CPU cores ({processor()}), torch {torch.__version__}, one thread a rank, gloo. "
        f"Medians, quartiles in brackets, n runs. Load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end."
    )
    text = "\n".join([machine, "", *table])
    print(text)
    if not options.dry:
        readme = Path(__file__).with_name("README.md")
        head, _, _ = readme.read_text().partition(MARK)
        readme.write_text(f"{head}{MARK}\n\n{text}\n")


if __name__ == "__main__":
    main()
