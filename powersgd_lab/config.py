"""Hydra's side of the lab: conf/ and the command line's overrides become checked settings.
Hydra's compose API is used, since `@hydra.main` makes directories before a mistake could be reported."""

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import NoReturn

from hydra import compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.errors import MissingConfigException
from hydra.errors import OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError
from omegaconf.errors import ConfigKeyError
from omegaconf.errors import MissingMandatoryValue
from omegaconf.errors import OmegaConfBaseException

from powersgd_lab import settings


GROUPS = (
    "model",
    "dataset",
    "powersgd",
    "optimizer",
    "trainer",
    "search",
    "launcher",
    "network",
    "trial",
    "experiment",
)

SCHEMAS = {
    "sweep": settings.Sweep,
    "mlp": settings.Mlp,
    "cnn": settings.Cnn,
    "resnet18": settings.ResNet18,
    "lstm": settings.Lstm,
    "gpt": settings.Gpt,
    "own_model": settings.OwnModel,
    "python_source": settings.PythonSource,
    "text": settings.TextFiles,
    "images": settings.Images,
    "random": settings.RandomData,
    "own_dataset": settings.OwnDataset,
    "powersgd": settings.PowerSGD,
    "sgd": settings.Sgd,
    "adam": settings.Adam,
    "own_optimizer": settings.OwnOptimizer,
    "trainer": settings.Trainer,
    "search": settings.Search,
    "launcher": settings.Launcher,
    "network": settings.Network,
    "trial": settings.TrialOptions,
}


def conf_dir() -> Path:
    """The folder of configurations: inside the package where it was installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


class _OurConf(SearchPathPlugin):
    """Keeps conf/ on Hydra's path when the user's own folder comes first."""

    def manipulate_search_path(self, search_path: Any) -> None:
        search_path.append("powersgd_lab", f"file://{conf_dir()}")


def load(overrides: Sequence[str] = (), config_name: str = "sweep", config_dir: str | None = None) -> settings.Sweep:
    """Compose conf/ with the overrides, Hydra's grammar, into checked settings.

    Raises ValueError of one line that names the key and what is allowed."""
    config = _compose(overrides, config_name, config_dir)
    try:
        sweep = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ValueError(_explain(error)) from None
    assert isinstance(sweep, settings.Sweep)
    for changes in sweep.search.settings:
        settings.vary(sweep.powersgd, changes)
    return sweep


def _compose(overrides: Sequence[str], config_name: str, config_dir: str | None) -> DictConfig:
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(group="schema", name=name, node=schema)
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ValueError(f"--config-dir={config_dir} is not a folder")
        Plugins.instance().register(_OurConf)
    folder = Path(config_dir).resolve() if config_dir is not None else conf_dir()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(config_name, [_opened(override) for override in overrides])
        if OmegaConf.get_type(config) is not settings.Sweep:
            raise ValueError(f"--config-name={config_name} does not begin with `/schema/sweep@_here_` in its defaults")
        _refuse_unknown(config, "")
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(error)) from None
    return config


def _opened(override: str) -> str:
    """`model.args.width=3` needs no `+`: conf/ cannot know the arguments of a user's own target."""
    return f"++{override}" if re.match(r"(model|dataset|optimizer)\.args\.", override) else override


def _refuse_unknown(node: DictConfig, prefix: str) -> None:
    """`+key=value` opens a closed dataclass in Hydra; here it stays closed, only `args` are open."""
    schema = OmegaConf.get_type(node)
    known = getattr(schema, "__dataclass_fields__", None)
    if known is None:
        return
    for key in map(str, node):
        if key not in known:
            raise ValueError(_unknown(f"{prefix}{key}", list(known)))
        if not OmegaConf.is_missing(node, key) and isinstance(node._get_node(key), DictConfig):
            _refuse_unknown(node[key], f"{prefix}{key}.")


def _unknown(key: str, known: Sequence[str]) -> str:
    allowed = [*known, "experiment"] if "." not in key else known
    close = difflib.get_close_matches(key.rpartition(".")[2], allowed, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{key}: there is no such key{hint}. Allowed here: {', '.join(allowed)}"


def _explain(error: Exception) -> str:
    """One line out of Hydra's or OmegaConf's several, with the key and what is allowed."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause).splitlines()[0]
    if isinstance(cause, OverrideParseException):
        return f"{cause.override}: cannot be read as KEY=VALUE ({text})"
    if isinstance(cause, MissingConfigException) and cause.options is not None:
        group, _, choice = str(cause.missing_cfg_file).rpartition("/")
        allowed = [option for option in cause.options if option != "schema"]
        return f"{group}={choice}: there is no such choice. Allowed: {', '.join(allowed)}"
    key = getattr(cause, "full_key", None)
    if key is None:
        return text
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} must be given"
    known = getattr(getattr(cause, "object_type", None), "__dataclass_fields__", None)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and known is not None:
        return _unknown(str(key), list(known))
    if "is not a ListConfig" in text:
        return f"{key}: a list is needed, such as [256]"
    return f"{key}: {text}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def from_command_line(command: str, description: str, arguments: Sequence[str]) -> settings.Sweep:
    """The settings that a command's arguments ask for, or SystemExit(0) after `--help` and `--cfg job`.

    Raises ValueError of one line."""
    parser = _Parser(
        prog=f"python -m powersgd_lab.{command}",
        usage="%(prog)s [--cfg job] [--config-dir DIR] [--config-name NAME] [GROUP=CHOICE …] [KEY=VALUE …]",
        description=description,
        epilog=_choices() + "\n\nEvery key with its value: --cfg job. What each means: the comments in conf/.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="Hydra's grammar, also +key=value and ~key")
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and end")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own configurations, looked up first")
    parser.add_argument("--config-name", metavar="NAME", default="sweep", help="the configuration to begin with")
    given = parser.parse_intermixed_args(arguments)
    if given.cfg:
        print(OmegaConf.to_yaml(_compose(given.overrides, given.config_name, given.config_dir)), end="")
        raise SystemExit(0)
    return load(given.overrides, given.config_name, given.config_dir)


def _choices() -> str:
    lines = ["groups and their choices:"]
    for group in GROUPS:
        names = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
        lines.append(f"  {group:<11} {', '.join(names)}")
    return "\n".join(lines)
