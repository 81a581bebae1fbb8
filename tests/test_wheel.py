"""The package as pip installs it: conf/ is inside the wheel, and found from any directory.
A checkout hides a missing file, so the wheel is built and unpacked away from it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_wheel_brings_its_configurations(tmp_path):
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    composed = subprocess.run(
        [sys.executable, "-m", "powersgd_lab.sweep", "--cfg", "job", "experiment=mnist5k_cnn"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "study: mnist5k_cnn" in composed.stdout
    shipped = {
        path.relative_to(installed / "powersgd_lab/conf") for path in installed.glob("powersgd_lab/conf/**/*.yaml")
    }
    assert shipped == {path.relative_to(ROOT / "conf") for path in ROOT.glob("conf/**/*.yaml")}
    assert list(elsewhere.iterdir()) == []
