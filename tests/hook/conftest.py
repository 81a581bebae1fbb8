"""Groups of ranks that all tests of the hooks share.
They start when first asked for, and end with the session.
"""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    group = Ranks(2)
    yield group
    group.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    group = Ranks(4)
    yield group
    group.close()


@pytest.fixture(params=[2, 4], ids=["W2", "W4"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    group: Ranks = request.getfixturevalue("pair" if request.param == 2 else "four")
    return group
