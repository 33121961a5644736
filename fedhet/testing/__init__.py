"""Helpers for tests of your own methods, plug-ins and other components.

    from fedhet.testing import check_choice, check_resume, sha256, sha256_apart, toy_task

    def test_alpha_0_is_fedavg() -> None:
        plain = sha256("method=fedavg", task=toy_task())
        assert sha256("method=fedmine", "method.pull=0", task=toy_task()) == plain

    def test_clients_share_only_messages_and_states() -> None:
        whole = sha256("method=fedmine", task=toy_task())
        assert sha256_apart("method=fedmine", task=toy_task()) == whole

    def test_a_killed_run_resumes() -> None:
        check_resume("method=fedmine", "rounds=3", task=toy_task())

    def test_the_file_lists_the_options() -> None:
        check_choice("method", "fedmine")

`fedhet new` writes such a test, and fedhet's own tests use the same functions. `Federation` runs a
method and its clients step by step, so that a test can compare a round with results computed by
hand.

It may import core, data, engines, flower and runs.
"""

from fedhet.data.toy import toy_task
from fedhet.testing.choices import check_choice
from fedhet.testing.resumed import check_equal, check_resume
from fedhet.testing.stepwise import Federation
from fedhet.testing.whole_runs import Apart, run_quietly, sha256, sha256_apart

__all__ = [
    "Apart",
    "Federation",
    "check_choice",
    "check_equal",
    "check_resume",
    "run_quietly",
    "sha256",
    "sha256_apart",
    "toy_task",
]
