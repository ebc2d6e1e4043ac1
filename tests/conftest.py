"""How hard the tests look: `HYPOTHESIS_PROFILE=long pytest` takes its time."""

import os

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("refold.testing")  # failures inside the contract show their values
settings.register_profile("usual", deadline=None)
settings.register_profile("long", deadline=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))
