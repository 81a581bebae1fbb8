"""Saving a PowerSGDState and going on from it in another process, by parameter names or, in a pickle, by order.
The saved buckets come along: DDP's first step after a restart uses others, and is computed in the saved ones instead.
"""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import torch

from powersgd_lab.hook.memory import Unit
from powersgd_lab.hook.pipeline import Item


if TYPE_CHECKING:
    from powersgd_lab.hook.state import PowerSGDState


VERSION = 1
SETTINGS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
COUNTERS = ("iter", "next_stats_report", "total_numel_before_compression", "total_numel_after_compression")


class Plan:
    """The buckets of the saved run, in which the first step after loading is computed."""

    def __init__(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        self.buckets = [list(bucket) for bucket in buckets]

    def regroup(self, items: list[Item]) -> list[Item]:
        """The step's gradients in the saved buckets; ``items`` themselves if these are the same or do not fit."""
        now = [[id(parameter) for parameter in item.parameters] for item in items]
        then = [[id(parameter) for parameter in bucket] for bucket in self.buckets]
        if now == then or sorted(itertools.chain(*now)) != sorted(itertools.chain(*then)):
            return items
        self._places = {
            id(parameter): piece
            for item in items
            for parameter, piece in zip(item.parameters, _pieces(item), strict=True)
        }
        saved = []
        for index, bucket in enumerate(self.buckets):
            pieces = [self._places[id(parameter)] for parameter in bucket]
            if len({(piece.dtype, piece.device) for piece in pieces}) > 1:
                return items
            saved.append(Item(index, torch.cat(pieces), bucket))
        return saved

    def hand_back(self, saved: list[Item]) -> None:
        """Copy the averaged gradients into DDP's own buckets."""
        for item in saved:
            for parameter, piece in zip(item.parameters, _pieces(item), strict=True):
                self._places[id(parameter)].copy_(piece)


def _pieces(item: Item) -> list[torch.Tensor]:
    return list(torch.split(item.gradient, [parameter.numel() for parameter in item.parameters]))


def settings_of(state: "PowerSGDState") -> dict[str, Any]:
    return {name: getattr(state, name) for name in SETTINGS} | {"random_seed": state._random_seed}


def _pack(state: "PowerSGDState", key_of: Mapping[int, Any]) -> dict[str, Any]:
    """Everything but the parameters themselves, which ``key_of`` replaces by names or positions."""
    algorithm, keys, position, has_gauss, cached = state.rng.get_state(legacy=True)
    assert algorithm == "MT19937"
    assert isinstance(keys, np.ndarray)
    matrices = [
        {
            "parameters": [key_of[id(parameter)] for parameter in unit.parameters],
            "number": unit.number,
            "error": None if (error := unit.error) is None else error.clone(),
            "q": None if unit.q is None or not state.warm_start else unit.q.clone(),
        }
        for unit in state._units.values()
    ]
    buckets = [[key_of[id(parameter)] for parameter in bucket] for _, bucket in sorted(state._buckets.items())]
    if state._layout_plan is not None:
        buckets = [[key_of[id(parameter)] for parameter in bucket] for bucket in state._layout_plan.buckets]
    return {
        "version": VERSION,
        "settings": settings_of(state),
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "stream": {
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "parameters": {
            key_of[id(parameter)]: {
                "shape": list(parameter.shape),
                "stride": _true_strides(parameter),
                "dtype": str(parameter.dtype),
            }
            for parameter in state._parameters.values()
        },
        "matrices": matrices,
        "buckets": buckets,
    }


def _true_strides(parameter: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have a second element: the others' mean nothing."""
    return [stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True) if size > 1]


def _unpack(state: "PowerSGDState", packed: Mapping[str, Any], parameter_of: Mapping[Any, torch.Tensor]) -> None:
    """Fill an empty memory from what ``_pack`` made."""
    state._parameters = {id(parameter_of[key]): parameter_of[key] for key in packed["parameters"]}
    for saved in packed["matrices"]:
        parameters = tuple(parameter_of[key] for key in saved["parameters"])
        unit = Unit(parameters, saved["number"])
        device = parameters[0].device
        unit.keep_error(None if saved["error"] is None else saved["error"].to(device, copy=True))
        unit.q = None if saved["q"] is None else saved["q"].to(device, copy=True)
        state._units[unit.key] = unit
    buckets = [[parameter_of[key] for key in bucket] for bucket in packed["buckets"]]
    state._layout_plan = Plan(buckets) if buckets else None


def _set_numbers(state: "PowerSGDState", packed: Mapping[str, Any]) -> None:
    """Settings, counters and the random stream."""
    for name in SETTINGS:
        setattr(state, name, packed["settings"][name])
    state._random_seed = packed["settings"]["random_seed"]
    for name in COUNTERS:
        setattr(state, name, packed["counters"][name])
    stream = packed["stream"]
    keys = stream["keys"].numpy().astype("uint32")
    state.rng.set_state(("MT19937", keys, stream["position"], stream["has_gauss"], stream["cached"]))


def _names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of the bare module, whatever it is wrapped in."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}


def state_dict(state: "PowerSGDState", model: torch.nn.Module) -> dict[str, Any]:
    if state._restored is not None:
        raise ValueError("a state loaded from a pickle knows no parameter names before its first step: take one first")
    names = {id(parameter): name for name, parameter in _names(model).items()}
    strangers = [tuple(parameter.shape) for key, parameter in state._parameters.items() if key not in names]
    if strangers:
        raise ValueError(
            f"model lacks parameters that this state has met, of shapes {strangers}: pass the model it serves"
        )
    return _pack(state, names)


def load_state_dict(state: "PowerSGDState", packed: Mapping[str, Any], model: torch.nn.Module) -> None:
    if packed.get("version") != VERSION:
        raise ValueError(f"state_dict must be of version {VERSION}; got {packed.get('version')!r}")
    parameters = _names(model)
    differences = [f"{name} is missing from the model" for name in packed["parameters"] if name not in parameters]
    if packed["parameters"]:
        differences += [
            f"{name} is not in state_dict"
            for name, parameter in parameters.items()
            if parameter.requires_grad and name not in packed["parameters"]
        ]
    for name, saved in packed["parameters"].items():
        if name in parameters:
            differences += [f"{name} {text}" for text in _differences(parameters[name], saved)]
    if differences:
        raise ValueError("state_dict does not match the model: " + "; ".join(differences))
    state._forget()
    _set_numbers(state, packed)
    _unpack(state, packed, parameters)


def _differences(parameter: torch.Tensor, saved: Mapping[str, Any]) -> list[str]:
    if list(parameter.shape) != list(saved["shape"]):
        return [f"has shape {tuple(parameter.shape)}, saved was {tuple(saved['shape'])}"]
    if str(parameter.dtype) != saved["dtype"]:
        return [f"has dtype {parameter.dtype}, saved was {saved['dtype']}"]
    if _true_strides(parameter) != list(saved["stride"]):
        return [f"has another memory layout (strides {_true_strides(parameter)}, saved were {list(saved['stride'])})"]
    return []


class Restored:
    """A pickled state's memory, waiting for the parameters: they come, in order, with the next step's buckets."""

    def __init__(self, packed: Mapping[str, Any]) -> None:
        self.packed = packed

    def resolve(self, state: "PowerSGDState") -> None:
        """Attach the memory to the parameters that this step's buckets brought.

        Raises:
            ValueError: if they are not as many, or not of the same shapes in the same order.
        """
        met = list(state._parameters.values())
        saved = self.packed["parameters"]
        shapes, expected = [list(p.shape) for p in met], [entry["shape"] for entry in saved.values()]
        if shapes != expected:
            raise ValueError(
                f"the pickled state was of parameters of shapes {expected} in order of DDP's first buckets, "
                f"this model has {shapes}: use state_dict and load_state_dict, which go by name"
            )
        state._restored = None
        _unpack(state, self.packed, dict(enumerate(met)))


def pickled(state: "PowerSGDState") -> dict[str, Any]:
    if state._restored is not None:
        return {"packed": {**state._restored.packed, **_numbers_only(state)}}
    return {"packed": _pack(state, {key: position for position, key in enumerate(state._parameters)})}


def _numbers_only(state: "PowerSGDState") -> dict[str, Any]:
    packed = _pack(state, {})
    return {name: packed[name] for name in ("settings", "counters", "stream")}


def unpickle(state: "PowerSGDState", pickled_state: Mapping[str, Any]) -> None:
    packed = pickled_state["packed"]
    state.rng = np.random.RandomState(0)
    _set_numbers(state, packed)
    if packed["parameters"]:
        state._restored = Restored(packed)
