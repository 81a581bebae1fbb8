"""The time of all-reduces from their bytes: the closed form of a ring.
A prediction of the network alone: nothing overlaps, nothing else uses the link, compressing is not in it."""

from powersgd_lab.network.links import Link


def ring_wire_bytes(payload_bytes: float, world_size: int) -> float:
    """Bytes one rank puts on the network for a ring all-reduce of `payload_bytes`: all but its own part, twice."""
    return 2 * (world_size - 1) / world_size * payload_bytes


def ring_seconds(payload_bytes: float, world_size: int, link: Link, allreduces: float = 1) -> float:
    """Seconds that `allreduces` ring all-reduces of `payload_bytes` together take, one after the other.

    Each goes 2 (W - 1) times around, reduce-scatter then all-gather, and each time pays the latency.
    Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations."""
    assert world_size >= 1
    hops = 2 * (world_size - 1)
    return 8 * ring_wire_bytes(payload_bytes, world_size) / link.bandwidth + allreduces * hops * link.latency
