"""When a process that has ended is started again."""

import pytest

from deploy.local.restarts import LONGEST_DELAY_S, STABLE_AFTER_S, GiveUp, Restart, RestartPolicy, describe_exit


def ready_process() -> RestartPolicy:
    policy = RestartPolicy()
    policy.started(0.0)
    policy.became_ready()
    return policy


def test_delays_double_up_to_the_longest() -> None:
    policy, delays = ready_process(), []
    for second in range(8):
        policy.started(float(second))
        decision = policy.exited("exited with 1", second + 0.5)
        assert isinstance(decision, Restart)
        delays.append(decision.after_s)
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_DELAY_S, LONGEST_DELAY_S]


def test_a_stable_run_makes_the_next_restart_quick_again() -> None:
    policy = ready_process()
    for _ in range(5):
        policy.started(100.0)
        policy.exited("was killed by SIGKILL", 100.1)
    policy.started(200.0)
    assert policy.exited("was killed by SIGKILL", 200.0 + STABLE_AFTER_S) == Restart(0.1)


def test_what_was_ready_once_is_restarted_for_ever() -> None:
    policy = ready_process()
    for _ in range(100):
        policy.started(1.0)
        assert isinstance(policy.exited("exited with 1", 1.0), Restart)


def test_what_never_became_ready_gets_one_more_try() -> None:
    policy = RestartPolicy()
    policy.started(0.0)
    assert policy.exited("exited with 3", 0.5) == Restart(0.1)
    policy.started(0.6)
    assert policy.exited("exited with 3", 1.0) == GiveUp("exited with 3 and was not ready once in 2 starts")


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "exited with 0"), (2, "exited with 2"), (-9, "was killed by SIGKILL"), (-63, "was killed by signal 63")],
)
def test_an_exit_is_described_in_words(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words
