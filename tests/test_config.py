"""Configurations as a user gives them: what is composed, and the one line that answers a mistake.
Every message must name the key and what is allowed."""

import pytest
import yaml

from powersgd_lab import config
from powersgd_lab import settings


def test_defaults_are_the_main_job():
    sweep = config.load()
    assert (sweep.model.name, sweep.dataset.name, sweep.launcher.world_size) == ("gpt", "python_source", 2)
    assert [hook.name for hook in sweep.search.baselines] == ["off", "bf16"]
    assert sweep.study == "python_source_gpt"


@pytest.mark.parametrize("group", config.GROUPS)
def test_every_choice_composes(group):
    needed = {"text": ["dataset.files=[a.txt]"], "own": [f"{group}._target_=os.getcwd"]}
    for path in sorted((config.conf_dir() / group).glob("*.yaml")):
        sweep = config.load([f"{group}={path.stem}", *needed.get(path.stem, [])])
        assert isinstance(sweep, settings.Sweep)


def test_every_powersgd_key_has_a_comment_that_says_what_it_moves():
    text = (config.conf_dir() / "powersgd" / "layerwise.yaml").read_text()
    lines = {line.split(":")[0]: line for line in text.splitlines() if not line.startswith(("#", " "))}
    for field in ("matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start"):
        assert "accuracy" in lines[field]
    assert set(yaml.safe_load(text)) - {"defaults"} == set(settings.PowerSGD.__dataclass_fields__)
    assert all("#" in lines[name] for name in settings.PowerSGD.__dataclass_fields__ if name != "hook")


def test_command_line_wins_over_experiment():
    sweep = config.load(["experiment=mnist5k_cnn", "trainer.epochs=2", "model=mlp"])
    assert (sweep.trainer.epochs, sweep.model.name, sweep.study) == (2, "mlp", "mnist5k_cnn")


@pytest.mark.parametrize(("given", "value"), [("0", 0), ("1", 1), ("0.5", 0.5), ("3%", "3%")])
def test_a_tolerance_is_a_number_or_a_percentage(given, value):
    assert config.load([f"search.tolerance={given}"]).search.tolerance == value


def test_own_target_takes_any_argument():
    sweep = config.load(["model=own", "model._target_=my.Net", "model.args.width=3"])
    assert settings.component(sweep.model) == {"name": "own", "_target_": "my.Net", "args": {"width": 3}}


def test_settings_by_hand_are_lists_of_changes():
    sweep = config.load(["search.settings=[{hook: batched, matrix_approximation_rank: 4}]"])
    assert sweep.search.settings == [{"hook": "batched", "matrix_approximation_rank": 4}]


MISTAKES = [
    (["model=gtp"], ["model=gtp", "gpt", "lstm"]),
    (["modle=gpt"], ["modle", "did you mean model", "experiment"]),
    (["trainer.stepz=3"], ["trainer.stepz", "did you mean steps", "batch_size"]),
    (["+trainer.stepz=3"], ["trainer.stepz", "steps"]),
    (["++trainer.ddp.cap=3"], ["trainer.ddp.cap", "bucket_cap_mb"]),
    (["+colour=red"], ["colour", "study"]),
    (["model.args.width=3"], ["model.args", "heads"]),
    (["trainer.steps=abc"], ["trainer.steps", "abc", "Integer"]),
    (["powersgd.matrix_approximation_rank=1.5"], ["powersgd.matrix_approximation_rank", "1.5"]),
    (["powersgd.matrix_approximation_rank=0"], ["powersgd.matrix_approximation_rank=0", "at least 1"]),
    (["powersgd.hook=on"], ["powersgd.hook", "layerwise, batched, torch, off, fp16, bf16"]),
    (["powersgd.start_powerSGD_iter=1"], ["powersgd.start_powerSGD_iter=1", "at least 2"]),
    (["powersgd.start_fraction=1"], ["powersgd.start_fraction=1", "[0, 1)"]),
    (["powersgd.min_compression_rate=-1"], ["powersgd.min_compression_rate=-1", "at least 0"]),
    (["search.baselines=[off,layerwise]"], ["search.baselines", "off, bf16, fp16"]),
    (["search.baselines=[]"], ["search.baselines", "off, bf16, fp16"]),
    (["search.tolerance=much"], ["search.tolerance=much", "percentage"]),
    (["search.settings=[{rank: 4}]"], ["search.settings", "rank", "matrix_approximation_rank"]),
    (["search.settings=[{matrix_approximation_rank: 1.5}]"], ["search.settings", "matrix_approximation_rank"]),
    (["launcher.world_size=0"], ["launcher.world_size=0", "at least 1"]),
    (["launcher.device=tpu"], ["launcher.device", "auto, cpu, cuda"]),
    (["trainer.epochs=3"], ["trainer.steps", "trainer.epochs", "null"]),
    (["dataset=text"], ["dataset.files must be given"]),
    (["model=own"], ["model._target_ must be given"]),
    (["study=a/b"], ["study", "folder name"]),
    (["~trainer"], ["trainer must be given"]),
    (["trainer"], ["trainer", "KEY=VALUE"]),
    (["trainer.steps=[1"], ["trainer.steps=[1", "KEY=VALUE"]),
]


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(overrides) for overrides, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_key_and_choice(overrides, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the words below say more than one pattern)
        config.load(overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_help_names_groups_and_choices(capsys):
    with pytest.raises(SystemExit) as caught:
        config.from_command_line("sweep", "what it does", ["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "mnist5k_cnn" in printed
    assert "layerwise" in printed


def test_cfg_job_prints_what_would_run(capsys):
    with pytest.raises(SystemExit) as caught:
        config.from_command_line("sweep", "what it does", ["--cfg", "job", "trainer.steps=77"])
    assert caught.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["steps"] == 77


def test_a_folder_of_ones_own_comes_before_ours(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nstudy: mine\n")
    arguments = ["--config-dir", str(tmp_path), "experiment=mine", "model=mlp"]
    sweep = config.from_command_line("sweep", "what it does", arguments)
    assert (sweep.study, sweep.model.name) == ("mine", "mlp")
    with pytest.raises(ValueError, match="config-dir"):
        config.from_command_line("sweep", "what it does", ["--config-dir", str(tmp_path / "absent")])
