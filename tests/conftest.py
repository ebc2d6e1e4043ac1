import pytest

pytest.register_assert_rewrite("refold.testing")
