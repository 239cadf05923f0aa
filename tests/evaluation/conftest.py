"""Servers of this machine that a test starts, and that end with it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from openai_server import Answer, Server, about


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with ExitStack() as started:

        def start(answer: Answer, about: Answer = about) -> Server:
            return started.enter_context(closing(Server(answer, about)))

        yield start
