"""A sample of `hammer.py`: run it by itself with eight writers and a thousand messages each."""

import pytest

import hammer


@pytest.mark.parametrize("engine", ["postgresql", "valkey"])
def test_a_killed_server_loses_nothing_that_was_acknowledged(engine):
    done = hammer.run(engine, writers=3, messages=100, conversations=1, kill_each=80, timeout_s=0.2)
    assert done.acknowledged == 300
    assert done.kills >= 3


@pytest.mark.parametrize("engine", ["postgresql", "valkey", "sqlite"])
def test_writers_to_many_conversations_lose_nothing(engine):
    done = hammer.run(engine, writers=3, messages=40, conversations=8)
    assert done.acknowledged == 120
    assert not done.errors
