"""Links by name, as `network.link` names them: what a rank can send in a second, and what a message costs at least.
Orders of magnitude for planning; a cluster's own numbers are better where they are known."""

from dataclasses import dataclass

from powersgd_lab.settings import require


@dataclass(frozen=True)
class Link:
    """bandwidth: bits per second that one rank sends while it receives as many.
    latency: seconds from one process handing over an empty message to the next one having it."""

    bandwidth: float
    latency: float


LINKS = {
    # Fast Ethernet, a slow site-to-site line, a throttled cloud machine: a full frame alone takes 0.12 ms to send.
    "100mbit": Link(bandwidth=100e6, latency=300e-6),
    # Gigabit Ethernet in one rack: TCP through the kernel on both sides and one switch.
    "1gbit": Link(bandwidth=1e9, latency=100e-6),
    # A usual cloud network: the frame's own time no longer counts, the kernel's still does.
    "10gbit": Link(bandwidth=10e9, latency=50e-6),
    # InfiniBand or RoCE: the adapter moves the data, the kernel is out of the way.
    "100gbit": Link(bandwidth=100e9, latency=5e-6),
}


def link(name: str) -> Link:
    """Raises ValueError that names the links there are."""
    require(name in LINKS, "network.link", name, f"one of {', '.join(LINKS)}")
    return LINKS[name]
