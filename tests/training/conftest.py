"""The fork server that the tests of a file share: starting it costs seconds, a trial on it a fraction of one.
Trials themselves are made in tiny.py."""

import pytest

from powersgd_lab.training.launch import ForkServer


@pytest.fixture(scope="module")
def server():
    with ForkServer() as running:
        yield running
