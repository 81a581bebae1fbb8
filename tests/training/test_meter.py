"""The meter's sums over a made-up course of steps, which part of a run its medians are of, and what a save keeps.
Times come from a clock that the tests turn, so that the arithmetic is exact."""

import pytest
import torch

from powersgd_lab.training import meter as room
from powersgd_lab.training.meter import Meter
from powersgd_lab.training.meter import StepTime
from powersgd_lab.training.meter import typical


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    found = Clock()
    monkeypatch.setattr(room.time, "perf_counter", found)
    return found


def a_step(meter, clock, payload):
    """Forward 4 s, then two all-reduces; compressing 1 s, waiting 2 s in the hook and 8 s after its last return."""
    meter.begin_step()
    clock.now += 4
    meter.begin_backward()
    assert meter.in_backward
    for kind, size in payload.items():
        meter.issued({kind: size})
    meter.compressed(0.5)
    meter.compressed(0.5)
    meter.waited(2.0)
    clock.now += 3
    meter.hook_returned()
    clock.now += 8
    meter.end_backward()
    assert not meter.in_backward
    clock.now += 16
    meter.end_step()


def test_bytes_add_up_over_the_run_and_times_over_a_step(clock):
    meter = Meter(torch.device("cpu"))
    a_step(meter, clock, {"vanilla": 1000})
    assert (meter.step, meter.step_payload, meter.step_allreduces) == (1, 1000, 1)
    a_step(meter, clock, {"P": 30, "Q": 20})
    assert (meter.step, meter.step_payload, meter.step_allreduces) == (2, 50, 2)
    assert meter.payload == {"vanilla": 1000, "P": 30, "Q": 20}
    assert meter.times == [StepTime(step=31.0, compress=1.0, communicate=10.0)] * 2


def test_one_all_reduce_may_carry_several_kinds(clock):
    meter = Meter(torch.device("cpu"))
    meter.begin_step()
    meter.issued({"uncompressed": 8, "P": 4})
    assert (meter.step_payload, meter.step_allreduces) == (12, 1)


def test_control_traffic_is_a_column_of_its_own():
    meter = Meter(torch.device("cpu"))
    meter.control(torch.zeros(4, dtype=torch.float64))
    meter.control(torch.zeros(3))
    assert meter.control_bytes == 44
    assert not meter.payload


def test_a_saved_meter_counts_on(clock):
    meter, other = Meter(torch.device("cpu")), Meter(torch.device("cpu"))
    a_step(meter, clock, {"P": 30})
    meter.control(torch.zeros(1))
    other.load_state_dict(meter.state_dict())
    for each in (meter, other):
        a_step(each, clock, {"P": 30, "Q": 1})
    assert (other.payload, other.control_bytes, other.times) == (meter.payload, 4, meter.times)
    assert other.payload == {"P": 60, "Q": 1}


def times(*seconds):
    return [StepTime(step, step / 2, step / 4) for step in seconds]


@pytest.mark.parametrize(
    ("seconds", "start", "step"),
    [
        ((90, 80, 1, 2, 9), 0, 2),  # the first two of the run are not settled
        ((9, 9, 9, 50, 40, 3, 4, 5), 3, 4),  # nor the first two of the compressed phase, and the vanilla one is out
        ((9, 9, 3, 4, 5), 20, 4),  # a run that did not get there: the whole of it
        ((7, 5), 0, 6),  # too short to settle
    ],
)
def test_a_typical_step_is_the_median_of_the_last_phase(seconds, start, step):
    assert typical(times(*seconds), start) == StepTime(step, step / 2, step / 4)
