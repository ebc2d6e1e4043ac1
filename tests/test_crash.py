"""A few rounds of `crash.py`; run it by itself for a thousand."""

import os

import pytest

import crash


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork a process")
def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path):
    done = crash.run(15, 7, tmp_path)
    assert done["rounds"] == 15
    assert done["killed"] > 5
    assert done["edits"] > 15
    assert done["snapshots"] >= 1
