"""How the stateful property tests run: a few examples in the suite, always the same; many new ones by `make properties`."""
from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

EXAMPLES = int(os.environ.get("EXAMPLES") or 0)
"""of each machine; 0 in the suite"""


def check(machine: type[RuleBasedStateMachine], few: int, steps: int = 40) -> None:
    """Run `machine` for `few` examples of up to `steps` rules, or as many as EXAMPLES says."""
    run_state_machine_as_test(machine, settings=settings(
        max_examples=EXAMPLES or few, stateful_step_count=steps, deadline=None, derandomize=not EXAMPLES, database=None,
        suppress_health_check=list(HealthCheck), print_blob=True))
