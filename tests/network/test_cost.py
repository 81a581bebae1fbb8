"""The cost model against closed forms that are worked out by hand.
A wrong factor of two or of eight is what would go unseen otherwise."""

import pytest

from powersgd_lab import settings
from powersgd_lab.network.cost import ring_seconds
from powersgd_lab.network.cost import ring_wire_bytes
from powersgd_lab.network.links import LINKS
from powersgd_lab.network.links import Link
from powersgd_lab.network.links import link


SLOW = Link(bandwidth=8e6, latency=0.01)  # a megabyte in a second


@pytest.mark.parametrize(
    ("world_size", "allreduces", "expected"),
    [
        (1, 1, 0.0),  # nobody to send to
        (2, 1, 1.0 + 2 * 0.01),
        (2, 5, 1.0 + 5 * 2 * 0.01),
        (4, 1, 1.5 + 6 * 0.01),
        (8, 2, 1.75 + 2 * 14 * 0.01),
    ],
)
def test_a_megabyte_over_a_megabyte_a_second(world_size, allreduces, expected):
    assert ring_seconds(1e6, world_size, SLOW, allreduces) == pytest.approx(expected)


def test_a_ring_sends_nearly_twice_the_payload_however_many_ranks():
    assert [ring_wire_bytes(1000, w) for w in (1, 2, 4)] == [0, 1000, 1500]
    assert ring_wire_bytes(1000, 10_000) == pytest.approx(2000, rel=1e-3)


def test_faster_links_are_faster_for_any_size():
    for payload in (0, 1e3, 1e9):
        times = [ring_seconds(payload, 4, link(name)) for name in LINKS]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == len(times)


def test_the_default_link_exists():
    assert link(settings.Network().link) == Link(1e9, 100e-6)


def test_an_unknown_link_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"network.link=2gbit .* one of 100mbit, 1gbit, 10gbit, 100gbit$"):
        link("2gbit")
