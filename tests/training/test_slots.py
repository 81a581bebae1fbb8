"""Which cores and GPUs trials get that run side by side: disjoint, within what this process may use.
The machine is made up by replacing what is asked of it: its cores, its GPUs, an outer CUDA_VISIBLE_DEVICES."""

import pytest

from powersgd_lab.settings import Device
from powersgd_lab.settings import Launcher
from powersgd_lab.training import slots as room
from powersgd_lab.training.slots import Slot
from powersgd_lab.training.slots import slots


@pytest.fixture
def machine(monkeypatch):
    def of(cores=8, gpus=0, visible=None):
        monkeypatch.setattr(room, "cores", lambda: list(range(cores)))
        monkeypatch.setattr(room.torch.cuda, "device_count", lambda: gpus)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return of


def test_one_slot_has_the_whole_machine(machine):
    machine(cores=4)
    assert slots(Launcher(world_size=2, slots=1), Device.cpu) == [Slot()]


def test_slots_have_cores_of_their_own(machine):
    machine(cores=9)
    found = slots(Launcher(world_size=2, slots=2), Device.cpu)
    assert [slot.cores for slot in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(("cores", "world_size", "count"), [(8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_auto_is_as_many_as_have_a_core_for_each_rank(machine, cores, world_size, count):
    machine(cores=cores)
    assert len(slots(Launcher(world_size=world_size, slots="auto"), Device.cpu)) == count


def test_gpus_are_dealt_out_inside_an_outer_choice(machine):
    machine(gpus=4, visible="3,5,6,7")
    found = slots(Launcher(world_size=2, slots="auto"), Device.cuda)
    assert [slot.environment for slot in found] == [{"CUDA_VISIBLE_DEVICES": "3,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    assert {slot.cores for slot in found} == {None}


@pytest.mark.parametrize(("device", "kind"), [(Device.cpu, "2 cores"), (Device.cuda, "1 GPUs")])
def test_more_slots_than_units_are_refused(machine, device, kind):
    machine(cores=2, gpus=1)
    with pytest.raises(ValueError, match=f"launcher.slots=3.*{kind}"):
        slots(Launcher(slots=3), device)
