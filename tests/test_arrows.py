"""The house's arrows: which room may import which, read off the sources themselves.
A new import against the design fails here before it becomes a habit."""

import ast
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "powersgd_lab"

# What each room may import of the others, as the design draws it.
ALLOWED = {
    "settings": set(),
    "hook": set(),
    "models": {"settings"},
    "datasets": {"settings"},
    "network": {"settings"},
    "statistics": {"settings"},
    "study": {"settings"},
    "config": {"settings"},
    "training": {"network", "hook", "models", "datasets", "settings"},
    "search": {"training", "statistics", "study", "settings"},
    "report": {"network", "statistics", "study", "settings"},
    "sweep": {"config", "search", "training", "report", "study", "statistics", "settings"},
    "train": {"config", "training", "settings"},
    "__init__": {"hook"},
}

# Libraries that only some rooms may load: ranks start faster and depend on less without them.
ONLY_IN = {
    "optuna": {"study", "search"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "pandas": {"report"},
    "matplotlib": {"report"},
    "rich": {"search", "sweep", "train", "report"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, `powersgd_lab.ROOM` for ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where an arrow points"
            assert node.module is not None
            inside = node.module == "powersgd_lab"
            found |= {f"powersgd_lab.{alias.name}" for alias in node.names} if inside else {node.module}
    return found


def test_every_room_is_drawn():
    assert {room_of(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    room = room_of(path)
    for module in imports_of(path):
        top, *rest = module.split(".")
        if top == "powersgd_lab" and rest:
            assert rest[0] in ALLOWED[room] | {room}, f"{room} must not import {module}"
        if top in ONLY_IN:
            assert room in ONLY_IN[top], f"{room} must not import {module}"


def test_the_hook_stands_alone():
    allowed = {"torch", "numpy", "powersgd_lab"}
    import sys

    for path in PACKAGE.glob("hook/**/*.py"):
        for module in imports_of(path):
            top = module.split(".")[0]
            assert top in allowed or top in sys.stdlib_module_names, f"{path.name} imports {module}"
            assert top != "powersgd_lab" or module.startswith("powersgd_lab.hook"), f"{path.name} imports {module}"


def test_annotations_are_objects_where_ddp_or_omegaconf_compares_them():
    for path in [*PACKAGE.glob("hook/**/*.py"), PACKAGE / "settings.py"]:
        assert "from __future__ import annotations" not in path.read_text(), path
