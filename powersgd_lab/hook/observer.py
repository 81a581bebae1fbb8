"""What a hook tells to whoever measures it: which bytes travel, and where the calling thread's time goes.
It lives apart from the hooks, so that a meter can implement it without importing them, and costs nothing when unset.
"""

from collections.abc import Mapping
from typing import Protocol
from typing import runtime_checkable


VANILLA = "vanilla"
UNCOMPRESSED = "uncompressed"
P = "P"
Q = "Q"
CONTROL = "control"


@runtime_checkable
class Observer(Protocol):
    """Receives the facts of each hook call, on the thread that runs the hook.

    The kinds of payload are ``vanilla`` (a whole bucket, in the phase before compression or under a plain hook),
    ``uncompressed`` (slices that are not worth compressing), ``P`` and ``Q`` (the two factors), and ``control``.
    """

    def issued(self, payload: Mapping[str, int]) -> None:
        """One all-reduce starts; ``payload`` maps each kind it carries to its bytes on this rank."""

    def compressed(self, seconds: float) -> None:
        """The calling thread spent ``seconds`` compressing or decompressing."""

    def waited(self, seconds: float) -> None:
        """The calling thread was blocked for ``seconds`` waiting for an all-reduce."""
