import pytest

pytest.register_assert_rewrite("tests.actors.bugs_tokens", "tests.actors.bugs_calls")  # tests that several modules take over
