"""The dataclasses that every room speaks: a sweep, a trial, a PowerSGD setting.
Each field is checked where it is declared, so that a wrong value is named before any process starts."""

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import is_dataclass
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic import ValidationError


MISSING: Any = "???"  # OmegaConf's mark for a value that a configuration file must give

# What a change of a field means for a study: another study (identity, the default), the same study grown, or nothing.
GROWABLE = {"role": "growable"}
FREE = {"role": "free"}


class Hook(Enum):
    """What happens to the gradients: PowerSGD (ours twice, PyTorch's once) or a baseline."""

    layerwise = "layerwise"
    batched = "batched"
    torch = "torch"
    off = "off"
    fp16 = "fp16"
    bf16 = "bf16"

    @property
    def compresses(self) -> bool:
        return self in (Hook.layerwise, Hook.batched, Hook.torch)


class Schedule(Enum):
    constant = "constant"
    step = "step"
    cosine = "cosine"


class Strategy(Enum):
    grid = "grid"
    ladder = "ladder"
    halving = "halving"
    tpe = "tpe"


class TrialKind(Enum):
    train = "train"


class Backend(Enum):
    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def require(ok: bool, key: str, value: Any, allowed: str) -> None:
    """Raises the one line that a wrong value deserves: its key, and what is allowed there."""
    if not ok:
        raise ValueError(f"{key}={value} is not allowed: it must be {allowed}")


@dataclass
class PowerSGD:
    """One setting. The names, defaults and meaning of the documented `PowerSGDState` arguments are PyTorch's."""

    hook: Hook = Hook.layerwise
    matrix_approximation_rank: int = 1
    start_powerSGD_iter: int | None = None
    start_fraction: float | None = 0.1
    min_compression_rate: float = 2.0
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 0.0
    random_seed: int = 0
    compression_stats_logging_frequency: int = 10_000
    batch_tensors_with_same_shape: bool = False

    def __post_init__(self) -> None:
        rank, start, fraction = self.matrix_approximation_rank, self.start_powerSGD_iter, self.start_fraction
        require(rank >= 1, "powersgd.matrix_approximation_rank", rank, "a whole number of at least 1")
        require(start is None or start >= 0, "powersgd.start_powerSGD_iter", start, "a step, 0 or later")
        require(
            fraction is None or 0 <= fraction < 1, "powersgd.start_fraction", fraction, "in [0, 1), a part of all steps"
        )
        if self.hook.compresses:
            require(
                start is not None or fraction is not None,
                "powersgd.start_fraction",
                "null",
                "given, or powersgd.start_powerSGD_iter",
            )
            if start is not None and start <= 1 and (self.use_error_feedback or self.warm_start):
                raise ValueError(
                    f"powersgd.start_powerSGD_iter={start} is not allowed with error feedback or warm start: "
                    "it must be at least 2 (DDP rebuilds its buckets after the first step)"
                )
        rate = self.min_compression_rate
        require(rate >= 0 and math.isfinite(rate), "powersgd.min_compression_rate", rate, "finite and at least 0")
        epsilon = self.orthogonalization_epsilon
        require(
            epsilon >= 0 and math.isfinite(epsilon), "powersgd.orthogonalization_epsilon", epsilon, "finite and >= 0"
        )
        seed = self.random_seed
        require(0 <= seed < 2**32, "powersgd.random_seed", seed, "in [0, 2**32)")
        every = self.compression_stats_logging_frequency
        require(every >= 1, "powersgd.compression_stats_logging_frequency", every, "at least 1")


def vary(base: PowerSGD, changes: Mapping[str, Any]) -> PowerSGD:
    """`base` with some keys changed, as `search.settings` and the strategies do it.

    A changed fraction replaces a start that the base gives in steps. Raises ValueError that names the key."""
    known = [f.name for f in fields(PowerSGD)]
    for key in changes:
        require(key in known, "search.settings", f"{{{key}: …}}", f"made of {', '.join(known)}")
    values = {name: getattr(base, name) for name in known}
    if "start_fraction" in changes:
        values["start_powerSGD_iter"] = None
    try:
        return _POWERSGD.validate_python(values | dict(changes))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"search.settings: {key}: {message}" if key else f"search.settings: {message}") from None


_POWERSGD = TypeAdapter(PowerSGD)


@dataclass
class Model:
    """What `model` builds: `_target_` is called with the other fields, and with what the data set tells of itself."""

    name: str = MISSING
    _target_: str = MISSING


@dataclass
class Mlp(Model):
    hidden: list[int] = field(default_factory=lambda: [256, 256])


@dataclass
class Cnn(Model):
    width: int = 32


@dataclass
class ResNet18(Model):
    width: int = 64


@dataclass
class Lstm(Model):
    layers: int = 2
    units: int = 256
    dropout: float = 0.0
    tied: bool = True


@dataclass
class Gpt(Model):
    layers: int = 2
    width: int = 128
    heads: int = 4
    dropout: float = 0.0


@dataclass
class OwnModel(Model):
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Dataset:
    """What `dataset` builds: `_target_` is called with the other fields and returns a `datasets.base.Data`."""

    name: str = MISSING
    _target_: str = MISSING
    data_dir: str | None = field(default=None, metadata=FREE)


@dataclass
class PythonSource(Dataset):
    context: int = 64


@dataclass
class TextFiles(Dataset):
    files: list[str] = MISSING
    context: int = 64


@dataclass
class Images(Dataset):
    pass


@dataclass
class RandomData(Dataset):
    train_samples: int = 50_000
    validation_samples: int = 10_000
    channels: int = 3
    height: int = 32
    width: int = 32
    classes: int = 10


@dataclass
class OwnDataset(Dataset):
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Optimizer:
    """What `optimizer` builds: `_target_` is called with parameter groups and the other fields."""

    _target_: str = MISSING
    lr: float = 0.1
    weight_decay: float = 0.0


@dataclass
class Sgd(Optimizer):
    momentum: float = 0.9
    nesterov: bool = True


@dataclass
class Adam(Optimizer):
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8


@dataclass
class OwnOptimizer(Optimizer):
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Ddp:
    """Arguments of `DistributedDataParallel` by their own names."""

    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True

    def __post_init__(self) -> None:
        require(self.bucket_cap_mb > 0, "trainer.ddp.bucket_cap_mb", self.bucket_cap_mb, "more than 0 (MiB)")


@dataclass
class Trainer:
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 32
    accumulation: int = 1
    warmup_steps: int = 0
    schedule: Schedule = Schedule.constant
    milestones: list[float] = field(default_factory=lambda: [0.5, 0.75])
    gamma: float = 0.1
    final_fraction: float = 0.0
    decay_norms_and_biases: bool = True
    clip_norm: float | None = None
    autocast: bool = False
    eval_steps: int | None = None
    eval_epochs: float | None = None
    eval_batch_size: int = 256
    eval_samples: int | None = None
    metric: str | None = None
    timeout: float | None = field(default=None, metadata=FREE)
    checkpoint_seconds: float | None = field(default=60.0, metadata=FREE)
    ddp: Ddp = field(default_factory=Ddp)

    def __post_init__(self) -> None:
        given = [self.steps is not None, self.epochs is not None]
        if sum(given) != 1:
            raise ValueError(
                f"trainer.steps={self.steps} and trainer.epochs={self.epochs}: exactly one of the two must be given, "
                "the other set to null"
            )
        require(self.steps is None or self.steps >= 2, "trainer.steps", self.steps, "at least 2")
        require(self.epochs is None or self.epochs > 0, "trainer.epochs", self.epochs, "more than 0")
        for name in ("batch_size", "accumulation", "eval_batch_size"):
            require(getattr(self, name) >= 1, f"trainer.{name}", getattr(self, name), "at least 1")
        require(self.warmup_steps >= 0, "trainer.warmup_steps", self.warmup_steps, "0 or more")
        require(
            sorted(self.milestones) == list(self.milestones) and all(0 < m < 1 for m in self.milestones),
            "trainer.milestones",
            self.milestones,
            "rising parts of all steps, each between 0 and 1",
        )
        require(self.gamma > 0, "trainer.gamma", self.gamma, "more than 0")
        require(0 <= self.final_fraction <= 1, "trainer.final_fraction", self.final_fraction, "in [0, 1]")
        require(self.clip_norm is None or self.clip_norm > 0, "trainer.clip_norm", self.clip_norm, "more than 0")
        samples = self.eval_samples
        require(samples is None or samples >= 1, "trainer.eval_samples", samples, "at least 1, or null")
        require(self.eval_steps is None or self.eval_steps >= 1, "trainer.eval_steps", self.eval_steps, "at least 1")
        require(self.eval_epochs is None or self.eval_epochs > 0, "trainer.eval_epochs", self.eval_epochs, "above 0")
        if self.eval_steps is not None and self.eval_epochs is not None:
            raise ValueError("trainer.eval_steps and trainer.eval_epochs: only one of the two may be given")
        pause = self.checkpoint_seconds
        require(pause is None or pause >= 0, "trainer.checkpoint_seconds", pause, "0 or more, or null")
        require(self.timeout is None or self.timeout > 0, "trainer.timeout", self.timeout, "more than 0 (seconds)")


@dataclass
class Search:
    strategy: Strategy = Strategy.grid
    baselines: list[Hook] = field(default_factory=lambda: [Hook.off, Hook.bf16])
    max_rank: int = field(default=16, metadata=GROWABLE)
    rank_growth: int = field(default=4, metadata=GROWABLE)
    start_fractions: list[float] = field(default_factory=lambda: [0.1, 0.3], metadata=GROWABLE)
    seeds: int = field(default=2, metadata=GROWABLE)
    trials: int = field(default=20, metadata=GROWABLE)
    settings: list[dict[str, Any]] = field(default_factory=list, metadata=GROWABLE)
    tolerance: int | float | str = field(default="2%", metadata=FREE)
    confidence: float | None = field(default=None, metadata=FREE)
    give_up: float | None = field(default=None, metadata=FREE)
    retry_failed: bool = field(default=False, metadata=FREE)

    def __post_init__(self) -> None:
        require(
            len(self.baselines) >= 1
            and not any(h.compresses for h in self.baselines)
            and len(set(self.baselines)) == len(self.baselines),
            "search.baselines",
            [h.name for h in self.baselines],
            "one or more different ones of off, bf16, fp16",
        )
        require(1 <= self.max_rank <= 2**16, "search.max_rank", self.max_rank, "between 1 and 65536")
        growth = self.rank_growth  # a rank's logarithm is a whole number, so that the grid may grow
        require(growth >= 2 and growth & (growth - 1) == 0, "search.rank_growth", growth, "a power of two from 2 on")
        require(
            len(self.start_fractions) >= 1 and all(0 <= f < 1 for f in self.start_fractions),
            "search.start_fractions",
            self.start_fractions,
            "one or more parts of all steps in [0, 1)",
        )
        require(self.seeds >= 1, "search.seeds", self.seeds, "at least 1")
        require(self.trials >= 1, "search.trials", self.trials, "at least 1")
        tolerance(self.tolerance, 1.0)
        give_up = self.give_up
        require(give_up is None or give_up > 0, "search.give_up", give_up, "more than 0 (baseline spreads), or null")
        require(
            self.confidence is None or 0.5 < self.confidence < 1,
            "search.confidence",
            self.confidence,
            "between 0.5 and 1, or null",
        )


@dataclass
class Launcher:
    world_size: int = 2
    slots: int | str = field(default=1, metadata=FREE)
    backend: Backend = Backend.auto
    device: Device = Device.auto
    threads: int | None = field(default=None, metadata=FREE)
    interface: str | None = field(default=None, metadata=FREE)
    grace: float = field(default=5.0, metadata=FREE)

    def __post_init__(self) -> None:
        require(self.world_size >= 1, "launcher.world_size", self.world_size, "at least 1")
        countable = self.slots == "auto" if isinstance(self.slots, str) else self.slots >= 1
        require(countable, "launcher.slots", self.slots, "a number of at least 1, or auto")
        require(self.threads is None or self.threads >= 1, "launcher.threads", self.threads, "at least 1, or null")
        require(self.grace >= 0, "launcher.grace", self.grace, "0 or more (seconds)")
        if self.backend is Backend.nccl and self.device is Device.cpu:
            raise ValueError("launcher.backend=nccl is not allowed with launcher.device=cpu: it must be gloo or auto")


@dataclass
class Network:
    link: str = field(default="1gbit", metadata=FREE)


@dataclass
class TrialOptions:
    kind: TrialKind = TrialKind.train


@dataclass
class Sweep:
    """Everything a study is made of, as conf/ composes it."""

    study: str = MISSING
    runs_dir: str = field(default="runs", metadata=FREE)
    seed: int = 0
    model: Model = MISSING
    dataset: Dataset = MISSING
    powersgd: PowerSGD = field(default_factory=PowerSGD)
    optimizer: Optimizer = MISSING
    trainer: Trainer = MISSING
    search: Search = field(default_factory=Search)
    launcher: Launcher = field(default_factory=Launcher)
    network: Network = field(default_factory=Network)
    trial: TrialOptions = field(default_factory=TrialOptions)

    def __post_init__(self) -> None:
        named = self.study not in ("", ".", "..") and "/" not in self.study and "\0" not in self.study
        require(named, "study", repr(self.study), "a plain folder name")
        require(0 <= self.seed < 2**31, "seed", self.seed, "in [0, 2**31)")


@dataclass
class Trial:
    """One setting and one seed, all that a rank needs; `trainer.steps` and `powersgd.start_powerSGD_iter` are resolved.

    `model`, `dataset` and `optimizer` are plain mappings with a `_target_`, see `build`."""

    model: dict[str, Any]
    dataset: dict[str, Any]
    optimizer: dict[str, Any]
    powersgd: PowerSGD
    trainer: Trainer
    launcher: Launcher
    seed: int = 0
    data_sha256: str | None = None
    kind: TrialKind = TrialKind.train

    @property
    def steps(self) -> int:
        assert self.trainer.steps is not None, "a trial's steps are resolved before it is made"
        return self.trainer.steps


_TRIAL = TypeAdapter(Trial)


def write_trial(trial: Trial, path: Path) -> None:
    path.write_bytes(_TRIAL.dump_json(trial, indent=1))


def read_trial(path: Path) -> Trial:
    return _TRIAL.validate_json(path.read_bytes())


def component(node: Any) -> dict[str, Any]:
    """The plain mapping of a model, data set or optimizer: the form in which a trial carries it."""
    return {f.name: getattr(node, f.name) for f in fields(node)}


def build(key: str, node: Mapping[str, Any], *args: Any, **offered: Any) -> Any:
    """Call `node["_target_"]` with the node's other entries, those of its `args`, and what it accepts of `offered`.

    `offered` is what another part of the lab knows (a data set's channels, classes, vocabulary): a callable takes from
    it by naming a parameter. A value that the node gives itself wins.

    Raises ValueError when the target cannot be imported or does not take the given arguments; `key` names the node."""
    target = node["_target_"]
    module, _, name = target.rpartition(".")
    try:
        call = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs a user's code, which may raise anything
        raise ValueError(f"{key}._target_={target} cannot be imported: {type(error).__name__}: {error}") from error
    given = {key: value for key, value in node.items() if key not in ("_target_", "name", "args")}
    given |= node.get("args") or {}
    signature = inspect.signature(call)
    names = signature.parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    given = {key: value for key, value in offered.items() if key in names or open_ended} | given
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        there = f" (the data set offers {', '.join(offered)})" if offered else ""
        raise ValueError(f"{key}._target_={target} does not take these arguments: {error}{there}") from None
    try:
        return call(*args, **given)
    except ValueError:
        raise  # it says what is wrong with the arguments
    except Exception as error:
        raise ValueError(f"{key}._target_={target} failed: {type(error).__name__}: {error}") from error


def tolerance(value: float | str, baseline: float) -> float:
    """`search.tolerance` in the metric's unit: a number as it stands, a percentage of the baseline's mean."""
    allowed = 'a number in the metric\'s unit or a percentage of the baseline such as "2%", at least 0'
    try:
        text = str(value).strip()
        number = float(text[:-1]) / 100 * abs(baseline) if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"search.tolerance={value} is not allowed: it must be {allowed}") from None
    require(number >= 0 and not math.isnan(number), "search.tolerance", value, allowed)
    return number


def resolve_start(powersgd: PowerSGD, steps: int, warmup_steps: int) -> int:
    """The step from which gradients are compressed, counted from 0.

    An explicit `start_powerSGD_iter` stands as it is; a fraction is rounded up, and never before the end of the
    warm-up nor before step 2 (the PowerSGD documents: the warm-up stays uncompressed, DDP rebuilds its buckets)."""
    if powersgd.start_powerSGD_iter is not None:
        return powersgd.start_powerSGD_iter
    assert powersgd.start_fraction is not None
    return max(math.ceil(round(powersgd.start_fraction * steps, 9)), warmup_steps, 2)


def resolved(powersgd: PowerSGD, steps: int, warmup_steps: int) -> PowerSGD:
    """The setting with its start in steps; `start_fraction` stays where the start came from it, else it is None."""
    if not powersgd.hook.compresses:
        return powersgd
    fraction = powersgd.start_fraction if powersgd.start_powerSGD_iter is None else None
    start = resolve_start(powersgd, steps, warmup_steps)
    return replace(powersgd, start_powerSGD_iter=start, start_fraction=fraction)


def setting_key(powersgd: PowerSGD) -> str:
    """The setting's name in tables, e.g. `off` or `layerwise-r4-s40`, then each key that is not at its default.

    Settings with one key are one setting: every PowerSGD hyperparameter is in it, except how often statistics are
    logged, which changes nothing that is trained."""
    if not powersgd.hook.compresses:
        return powersgd.hook.name
    assert powersgd.start_powerSGD_iter is not None, "the start is resolved before a setting is named"
    parts = [powersgd.hook.name, f"r{powersgd.matrix_approximation_rank}", f"s{powersgd.start_powerSGD_iter}"]
    named = ("hook", "matrix_approximation_rank", "start_powerSGD_iter", "start_fraction")
    for f in fields(powersgd):
        if f.name not in (*named, "compression_stats_logging_frequency") and getattr(powersgd, f.name) != f.default:
            value = getattr(powersgd, f.name)
            parts.append(f"{f.name}={str(value).lower() if isinstance(value, bool) else f'{value:g}'}")
    return "-".join(parts)


def plain(value: Any) -> Any:
    """Dataclasses and choices as JSON values, for records."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def identity(node: Any, prefix: str = "") -> dict[str, Any]:
    """The keys whose change makes another study, flat, with plain values."""
    found: dict[str, Any] = {}
    for f in fields(node):
        if "role" not in f.metadata:
            value, key = getattr(node, f.name), f"{prefix}{f.name}"
            found |= identity(value, f"{key}.") if is_dataclass(value) else {key: plain(value)}
    return found
