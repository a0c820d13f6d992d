"""Tests of the agent: the shared suite's assertions explain themselves here too."""

import pytest

pytest.register_assert_rewrite("tierkv.testing.stores", "agent_harness")
