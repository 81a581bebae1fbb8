"""recommendation.yaml as a user meets it: read by a person, loaded by a program, its snippet pasted and run.
Each snippet is run for real, under DDP in a one-process gloo group."""

import textwrap

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

from powersgd_lab import report
from powersgd_lab import settings
from powersgd_lab.report.recommendation import snippet
from powersgd_lab.settings import Hook
from powersgd_lab.settings import PowerSGD


OFF, BF16 = (Hook.off, None, None), (Hook.bf16, None, None)
RANK_4 = (Hook.layerwise, 4, 0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A gloo group of one process."""
    rendezvous = tmp_path_factory.mktemp("gloo") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def load(directory):
    report.write(directory)
    text = (directory / "report" / "recommendation.yaml").read_text()
    return yaml.safe_load(text), text


@pytest.mark.parametrize("hook", list(Hook), ids=lambda hook: hook.name)
def test_the_snippet_runs_as_it_stands(hook, alone):
    if hook is Hook.batched:
        setting = PowerSGD(hook=hook, start_powerSGD_iter=3, matrix_approximation_rank=2, warm_start=False)
    else:
        setting = PowerSGD(hook=hook, start_powerSGD_iter=3, matrix_approximation_rank=2, random_seed=7)
    names = {}
    exec(snippet(setting, 100), names)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    state = names["register"](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    inputs = torch.randn(8, 20)
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    if hook.compresses:
        assert (state.iter, state.matrix_approximation_rank, state.start_powerSGD_iter) == (8, 2, 3)


def test_the_snippet_sets_every_documented_argument():
    keys = {"use_error_feedback": False, "warm_start": False, "min_compression_rate": 1.5, "random_seed": 3}
    setting = PowerSGD(start_powerSGD_iter=7, matrix_approximation_rank=2, orthogonalization_epsilon=1e-8, **keys)
    text = snippet(setting, 70)
    assert "# 10% of the study's 70 steps" in text
    for key, value in settings.plain(setting).items():
        if key not in ("hook", "start_fraction"):
            assert f"{key}={value!r}," in text


def test_a_setting_to_use_comes_with_its_evidence(made_up):
    content, text = load(made_up)
    assert content["verdict"] == "use"
    assert content["setting"]["matrix_approximation_rank"] == 16
    assert content["setting"].keys() == settings.plain(PowerSGD()).keys()
    points = report.load(made_up).points.set_index("setting")
    point = points.loc[content["setting_key"]]
    assert content["metric"]["name"] == "perplexity"
    assert (content["metric"]["mean"], content["metric"]["n"]) == (pytest.approx(point["metric"], rel=1e-6), 2)
    interval = content["difference_to_baseline"]
    assert interval["low"] < interval["mean"] < interval["high"]
    assert interval["mean"] == pytest.approx(point["metric"] - points.loc["off", "metric"], rel=1e-5)
    assert content["compression_ratio"]["step"] == 8
    assert content["tolerance"]["asked"] == "5%"
    assert content["payload_bytes"] == point["payload_bytes"]
    assert textwrap.indent("def register(ddp_model", "  ") in text  # a block that can be copied, not one quoted line


def test_where_compression_does_not_pay_the_baseline_is_what_to_use(write):
    content, _ = load(write("poor", {OFF: 6.7, BF16: 6.7, RANK_4: 9.0}))
    assert (content["verdict"], content["setting"]) == ("do_not_use", {"hook": "bf16"})
    assert "worse" in content["reason"]
    assert "torch.bfloat16" in content["snippet"]


def test_an_undecided_study_says_what_may_settle_it(write):
    content, _ = load(write("open", {OFF: 6.7, BF16: 6.7, RANK_4: 7.0}, confidence=0.99, tolerance=0.3, seeds=2))
    assert (content["verdict"], content["setting"], content["snippet"]) == ("undecided", None, None)
    assert content["seeds_that_may_settle_it"] > 2
    assert content["decided_by"] == "99 % interval"


@pytest.mark.parametrize("metrics", [{}, {OFF: "waiting"}, {OFF: 6.7}, {OFF: 6.7, RANK_4: "fail"}])
def test_a_study_without_evidence_is_undecided(write, metrics):
    content, _ = load(write("bare", metrics))
    assert content["verdict"] == "undecided"
    assert content["reason"]
