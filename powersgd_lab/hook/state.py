"""PowerSGDState: the settings of the two PowerSGD hooks, and what they remember from step to step.
Names, arguments, defaults and meaning are PyTorch's; what is remembered belongs to parameters, never to bucket numbers.
"""

import logging
import math
import numbers
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Self

import numpy as np
import torch
import torch.distributed as dist

from powersgd_lab.hook import checkpoint
from powersgd_lab.hook.memory import BucketMemory
from powersgd_lab.hook.memory import Unit
from powersgd_lab.hook.observer import Observer
from powersgd_lab.hook.pipeline import Step


logger = logging.getLogger(__name__)


class PowerSGDState:
    """Settings and memory of ``powerSGD_hook`` or ``batched_powerSGD_hook`` for one DDP model.

    Args:
        process_group: the ranks to average over; None is the default group.
        matrix_approximation_rank: columns of each factor. Higher is more accurate and sends more. May be changed
            between steps: the factor columns that still fit are kept.
        start_powerSGD_iter: steps before this one are plain all-reduces; later is more accurate and sends more.
        min_compression_rate: a matrix is compressed if (rows + cols) · rank · rate < rows · cols; higher leaves more
            matrices uncompressed.
        use_error_feedback: add what compression lost to the next gradient; costs one gradient's size of memory.
        warm_start: begin each step from the last step's factors instead of random ones.
        orthogonalization_epsilon: added to column norms at approximation ranks 1 and 2; without effect above.
            Not needed here: columns without content never give NaN.
        random_seed: of the first factors; the same on all ranks, 0 ≤ seed < 2³².
        compression_stats_logging_frequency: steps between two log lines of statistics; values below 1 mean 1.
        batch_tensors_with_same_shape: multiply equal matrices of a bucket in one call where they lie at equal
            distances, without copying them (on GPU this is always done).
        observer: see ``Observer``; may be set later, is neither pickled nor part of ``state_dict``.

    Raises:
        ValueError: an argument out of range, or a start iteration below 2 together with error feedback or warm start
            (DDP rebuilds its buckets after the first step).

    One state serves one DDP model. Several models trained in turn may share one, each of their steps counting as a
    step; models whose backward passes interleave may not, which raises at the second model's first bucket.

    Source: Vogels et al. 2019, PowerSGD (arXiv:1905.13727), and PyTorch's document of its DDP communication hooks.
    """

    # Internal fields are documented where they are set; slots make a mistyped setting an error, as in PyTorch.
    __slots__ = (
        "_buckets",
        "_fresh",
        "_layout_plan",
        "_memories",
        "_observer",
        "_parameters",
        "_random_seed",
        "_rank",
        "_restored",
        "_step",
        "_stream_undo",
        "_streams",
        "_units",
        "batch_tensors_with_same_shape",
        "compression_stats_logging_frequency",
        "iter",
        "min_compression_rate",
        "next_stats_report",
        "orthogonalization_epsilon",
        "process_group",
        "rng",
        "start_powerSGD_iter",
        "total_numel_after_compression",
        "total_numel_before_compression",
        "use_error_feedback",
        "warm_start",
    )

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        observer: Observer | None = None,
    ) -> None:
        _require_integer("start_powerSGD_iter", start_powerSGD_iter, 0)
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start, because DDP rebuilds "
                f"its buckets after the first step; got {start_powerSGD_iter}"
            )
        _require_number("min_compression_rate", min_compression_rate)
        _require_number("orthogonalization_epsilon", orthogonalization_epsilon)
        _require_integer("random_seed", random_seed, 0, 2**32 - 1)
        _require_integer("compression_stats_logging_frequency", compression_stats_logging_frequency, None)
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        # One seed a step is drawn from this generator, alike on all ranks, when factors start at random.
        self.rng = np.random.RandomState(random_seed)
        self._random_seed = int(random_seed)
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.next_stats_report = 0
        self._observer = observer
        self._forget()
        logger.info("PowerSGD settings: %s", ", ".join(f"{k} = {v}" for k, v in checkpoint.settings_of(self).items()))

    def _forget(self) -> None:
        """Start without memory of any parameter."""
        # Parameters by id, in the order their buckets came in the first step.
        self._parameters: dict[int, torch.Tensor] = {}
        # Error and factor of each compressed matrix, by the ids of the parameters it is made of.
        self._units: dict[tuple[int, ...], Unit] = {}
        # The buffers of each bucket as DDP last formed it: views into them are what units hold.
        self._memories: dict[int, BucketMemory] = {}
        # The parameters of each bucket in the last step: saved, so that a resumed run can go on in the same buckets.
        self._buckets: dict[int, list[torch.Tensor]] = {}
        # The step under way, between its first bucket and its last.
        self._step: Step | None = None
        # Buckets of the run that was saved: the first step after loading is computed in them.
        self._layout_plan: checkpoint.Plan | None = None
        # Loaded from a pickle, which has no parameter names: waits for the first step to meet the parameters.
        self._restored: checkpoint.Restored | None = None
        # How to take back a draw, if the step that made it turns out not to be finite.
        self._stream_undo: tuple[Any, torch.Tensor | bool] | None = None
        # Units whose factors that draw made.
        self._fresh: set[tuple[int, ...]] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def matrix_approximation_rank(self) -> int:
        """Columns of each factor; a new value takes effect at the next step."""
        return self._rank

    @matrix_approximation_rank.setter
    def matrix_approximation_rank(self, value: int) -> None:
        _require_integer("matrix_approximation_rank", value, 1)
        self._rank = int(value)

    @property
    def observer(self) -> Observer | None:
        """Receives bytes and seconds of every hook call; see ``Observer``."""
        return self._observer

    @observer.setter
    def observer(self, value: Observer | None) -> None:
        self._observer = value

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Count a step when ``bucket`` is its last, and log the start of compression."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD compression starts after %s steps.", self.iter)

    def _meet(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember the order in which parameters first come: a pickle has nothing else to know them by."""
        if parameters and id(parameters[-1]) not in self._parameters:
            for parameter in parameters:
                self._parameters.setdefault(id(parameter), parameter)

    def _note_bucket(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """In the plain phase, know the buckets of the last step: the first compressed one draws by them."""
        if bucket.index() == 0:
            self._buckets = {}
        self._buckets[bucket.index()] = bucket.parameters()
        if bucket.is_last():
            self._layout_plan = None

    def compression_stats(self) -> tuple[float, int, int]:
        """Statistics of all compressed steps so far: (rate, elements before, elements after); rate is 0 before any."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def scale_errors(self, factor: float) -> None:
        """Multiply every remembered error by ``factor``.

        Errors are in units of the gradient. When a loss scale changes from s to t (GradScaler does so at
        ``update()``), gradients grow by t/s, and ``scale_errors(t / s)`` before the next backward pass keeps the
        errors in the same units. Call it alike on all ranks, between steps.

        Raises:
            ValueError: if ``factor`` is not finite.
        """
        if not math.isfinite(factor):
            raise ValueError(f"factor must be a finite number, not {factor!r}")
        for unit in self._units.values():
            error = unit.error
            if error is not None:
                error.mul_(factor)

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Everything needed to go on in another process, as plain tensors and numbers.

        Args:
            model: the DDP wrapper or the bare module, whichever is at hand: names carry no ``module.`` prefix.

        Returns:
            a dictionary that ``torch.load(weights_only=True)`` accepts. Errors are each rank's own: save one per rank.

        Raises:
            ValueError: if the state remembers a parameter that is not in ``model``.
        """
        return checkpoint.state_dict(self, model)

    def load_state_dict(self, state_dict: Mapping[str, Any], model: torch.nn.Module) -> None:
        """Go on from ``state_dict(model)`` of the same rank.

        Args:
            state_dict: what ``state_dict`` returned; its settings (rank, start, …) replace this state's.
            model: the DDP wrapper or the bare module.

        The next step is bit for bit what it would have been, although DDP's buckets are others in its first step:
        that step is computed in the saved buckets.

        Raises:
            ValueError: naming every parameter that is missing, unexpected, or of another shape, dtype or memory layout.
        """
        checkpoint.load_state_dict(self, state_dict, model)

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("A process group cannot be pickled: the loaded state will use the default group.")
        return checkpoint.pickled(self)

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.process_group = dist.group.WORLD
        self._observer = None
        self._forget()
        checkpoint.unpickle(self, pickled)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refused: a copy would meet the same parameters with half-shared memory."""
        raise TypeError("a PowerSGDState cannot be copied; make a new one, or pickle it into another process")


def _require_integer(name: str, value: object, least: int | None, most: int | None = None) -> None:
    allowed = "an integer"
    if least is not None:
        allowed += f" of at least {least}"
    if most is not None:
        allowed += f" and at most {most}"
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integral:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")
    number = int(value)  # type: ignore[call-overload]
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


def _require_number(name: str, value: object) -> None:
    """A finite real number that is not negative."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise ValueError(f"{name} must be a finite number of at least 0; got {value!r}")
