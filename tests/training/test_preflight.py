"""What the check before a sweep refuses, each in one line that names the key, and what it resolves.
Everything here must be found before a process starts, so no test starts one."""

from dataclasses import replace

import pytest
import tiny
import torch
from own_models import Net
from own_models import own

from powersgd_lab.settings import Adam
from powersgd_lab.settings import Backend
from powersgd_lab.settings import Device
from powersgd_lab.settings import Hook
from powersgd_lab.settings import Launcher
from powersgd_lab.settings import Network
from powersgd_lab.settings import OwnDataset
from powersgd_lab.settings import OwnModel
from powersgd_lab.settings import OwnOptimizer
from powersgd_lab.settings import PowerSGD
from powersgd_lab.settings import Sgd
from powersgd_lab.training import assembly
from powersgd_lab.training import preflight
from powersgd_lab.training.slots import cores


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the mistake is to ask for CUDA where it is not")


def sweep_of(launcher=None, powersgd=None, dataset=None, **choices):
    """100 samples, 8 steps of 2 x 4 of them, but for what is chosen otherwise; the device is the launcher's own."""
    chosen = {"model": own("Net"), "steps": 8, "batch_size": 4, "warmup_steps": 0} | choices
    asked = tiny.sweep(dataset=dataset or tiny.noise(train_samples=100), powersgd=powersgd, **chosen)
    return replace(asked, launcher=launcher or Launcher())


def sgd(**fields):
    return Sgd(_target_="torch.optim.SGD", **fields)


def own_dataset(name):
    return OwnDataset(name="own", _target_=f"own_models.{name}")


def target(name):
    return OwnModel(name="own", _target_=name)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        pytest.param({"launcher": Launcher(device=Device.cuda)}, "launcher.device=cuda", marks=without_cuda),
        pytest.param({"launcher": Launcher(backend=Backend.nccl)}, "launcher.backend=nccl", marks=without_cuda),
        ({"launcher": Launcher(slots=100_000)}, "launcher.slots=100000"),
        ({"metric": "perplexity"}, "trainer.metric=perplexity .* accuracy, loss"),
        ({"batch_size": 51}, "trainer.batch_size=51 .* 102 samples, and there are 100"),
        ({"batch_size": 17, "accumulation": 3}, "trainer.batch_size=17 .* 102 samples"),
        ({"steps": None, "epochs": 0.01}, "trainer.epochs=0.01 .* 12"),
        ({"warmup_steps": 8}, "trainer.warmup_steps=8 .* 8 steps"),
        ({"model": target("own_models.Nowhere")}, "_target_=own_models.Nowhere"),
        ({"model": target("no.such.module.Net")}, "_target_=no.such.module.Net"),
        ({"model": target("own_models.not_a_model")}, "model._target_=own_models.not_a_model .* not str"),
        ({"model": own("Net", depth=3)}, "model._target_=own_models.Net .*'depth'"),
        ({"model": own("Frozen")}, "model._target_=own_models.Frozen has no parameter"),
        ({"model": own("WrongShape")}, r"model._target_=own_models.WrongShape fails .* \(2, 'classes'\)"),
        ({"model": own("Net", height=9)}, "model._target_=own_models.Net fails .* shapes"),
        ({"model": own("Unused")}, "spare.weight: trainer.ddp.find_unused_parameters must be true"),
        ({"model": own("Sparse")}, "table.weight is sparse"),
        ({"dataset": own_dataset("not_data")}, "dataset._target_=own_models.not_data must return .* not str"),
        ({"dataset": own_dataset("regression")}, "task=regression .* classification, language"),
        ({"dataset": replace(tiny.noise(), channels=0)}, "dataset.channels=0"),
        ({"optimizer": sgd(lr=-1.0)}, "optimizer: .*-1.0"),
        ({"optimizer": OwnOptimizer(_target_="own_models.not_an_optimizer")}, "optimizer._target_=.* not str"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(choices, words):
    with pytest.raises(ValueError, match=words) as caught:
        preflight.prepare(sweep_of(**choices))
    assert "\n" not in str(caught.value)


def test_an_unknown_link_is_named():
    sweep = sweep_of()
    sweep.network = Network(link="string")
    with pytest.raises(ValueError, match=r"network\.link=string"):
        preflight.prepare(sweep)


def test_unused_parameters_may_be_allowed():
    sweep = sweep_of(model=own("Unused"))
    sweep.trainer.ddp.find_unused_parameters = True
    assert preflight.prepare(sweep).steps == 8


@pytest.mark.parametrize(
    ("batch", "accumulation", "world_size", "epochs", "per_epoch", "steps"),
    [(8, 1, 2, 1.0, 6, 6), (8, 1, 2, 2.5, 6, 15), (4, 3, 1, 0.3, 8, 3), (5, 2, 2, 3.0, 5, 15)],
)
def test_epochs_become_whole_steps(batch, accumulation, world_size, epochs, per_epoch, steps):
    sweep = sweep_of(
        steps=None,
        epochs=epochs,
        batch_size=batch,
        accumulation=accumulation,
        launcher=Launcher(world_size=world_size),
    )
    prepared = preflight.prepare(sweep)
    assert (prepared.steps_per_epoch, prepared.steps) == (per_epoch, steps)
    trial = preflight.make_trial(sweep, prepared, PowerSGD(hook=Hook.off), seed=4)
    assert (trial.trainer.steps, trial.trainer.epochs, trial.seed) == (steps, None, 4)


def test_what_is_prepared_of_model_data_and_metric():
    prepared = preflight.prepare(sweep_of(launcher=Launcher(device=Device.cpu)))
    parameters = 64 * 16 + 16 + 16 + 16 + 16 * 10 + 10
    assert (prepared.parameters, prepared.gradient_bytes) == (parameters, 4 * parameters)
    assert (prepared.metric, prepared.direction) == ("accuracy", "max")
    assert (prepared.device, prepared.backend) == ("cpu", "gloo")
    assert prepared.data["train_samples"] == 100
    other = preflight.prepare(sweep_of(metric="loss"))
    assert (other.metric, other.direction) == ("loss", "min")


def trial_with(powersgd, world_size=2, **trainer):
    sweep = sweep_of(launcher=Launcher(world_size=world_size, device=Device.cpu), powersgd=powersgd, **trainer)
    return preflight.make_trial(sweep, preflight.prepare(sweep), powersgd, seed=0)


def test_a_trial_has_nothing_left_to_resolve():
    trial = trial_with(PowerSGD(start_fraction=0.25), steps=40, warmup_steps=3)
    assert (trial.powersgd.start_powerSGD_iter, trial.powersgd.start_fraction) == (10, 0.25)
    assert (trial.launcher.device, trial.launcher.backend) == (Device.cpu, Backend.gloo)
    assert trial_with(PowerSGD(start_fraction=0.0), warmup_steps=5).powersgd.start_powerSGD_iter == 5


@pytest.mark.parametrize(
    ("powersgd", "choices", "words"),
    [
        (PowerSGD(start_powerSGD_iter=8), {}, "powersgd.start_powerSGD_iter=8 .* 8 steps"),
        (PowerSGD(start_fraction=0.9), {}, r"powersgd.start_powerSGD_iter=8 \(start_fraction=0.9\)"),
        (PowerSGD(), {"world_size": 1}, "launcher.world_size=1 .* at least 2"),
    ],
)
def test_compression_that_would_never_happen_is_refused(powersgd, choices, words):
    with pytest.raises(ValueError, match=words):
        trial_with(powersgd, **choices)


def test_the_last_step_is_early_enough_and_one_rank_may_train_uncompressed():
    assert trial_with(PowerSGD(start_powerSGD_iter=7)).powersgd.start_powerSGD_iter == 7
    assert trial_with(PowerSGD(hook=Hook.bf16), world_size=1).launcher.world_size == 1


def test_a_start_inside_the_warm_up_is_told_if_someone_chose_its_step():
    assert "start_powerSGD_iter=3" in preflight.start_warning(PowerSGD(start_powerSGD_iter=3, start_fraction=None), 5)
    assert preflight.start_warning(PowerSGD(start_powerSGD_iter=5, start_fraction=None), 5) is None
    assert preflight.start_warning(PowerSGD(start_powerSGD_iter=3, start_fraction=0.1), 5) is None
    assert preflight.start_warning(PowerSGD(hook=Hook.off), 5) is None


def test_warnings_tell_of_shared_cores_and_of_pytorchs_hook_in_one_bucket():
    many = len(cores()) + 1
    sharing = sweep_of(launcher=Launcher(world_size=many, device=Device.cpu), batch_size=1)
    assert any(f"{many} ranks share" in line for line in preflight.prepare(sharing).warnings)
    alone = sweep_of(launcher=Launcher(world_size=1, device=Device.cpu))
    assert preflight.prepare(alone).warnings == []
    theirs = sweep_of(launcher=Launcher(world_size=1, device=Device.cpu), powersgd=PowerSGD(hook=Hook.torch))
    assert ["one bucket" in line for line in preflight.prepare(theirs).warnings] == [True]


def test_norms_and_biases_are_left_undecayed_unless_asked_for():
    model = Net(1, 8, 8, 10)
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.5}
    groups = assembly.make_optimizer(node, model, decay_norms_and_biases=False).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "first.weight": 0.5,
        "first.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "last.weight": 0.5,
        "last.bias": 0.0,
    }
    (group,) = assembly.make_optimizer(node, model, decay_norms_and_biases=True).param_groups
    assert group["weight_decay"] == 0.5
    assert len(group["params"]) == 6


def test_an_adam_node_reaches_the_optimizer_with_all_its_fields():
    node = Adam(_target_="torch.optim.AdamW", lr=0.01, weight_decay=0.1, betas=[0.8, 0.9])
    sweep = sweep_of(optimizer=node)
    trial = preflight.make_trial(sweep, preflight.prepare(sweep), sweep.powersgd, 0)
    (group,) = assembly.make_optimizer(trial.optimizer, Net(1, 8, 8, 10), True).param_groups
    assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (0.01, 0.1, (0.8, 0.9))
