"""Writing a report's files whole or not at all.
Tables are rewritten while people and notebooks read them, so that no half of one may ever be seen."""

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> Path:
    """Write `path` atomically, making its folder when there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path
