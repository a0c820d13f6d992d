"""Tests of the agent: their harness's assertions explain themselves."""

import pytest

pytest.register_assert_rewrite("agent_harness")
