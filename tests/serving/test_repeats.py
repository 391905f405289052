"""Which dispatches are exact after rounds that gave nothing."""

import pytest

from kimi_jax.serving.repeats import MOST, Repeats


def test_one_exact_dispatch_follows_a_loss():
    repeats = Repeats()
    assert not repeats.next()
    repeats.observe(True, exact=False)
    assert repeats.next()
    repeats.sent(True)
    assert not repeats.next()


@pytest.mark.parametrize("ahead", [0, 1])
def test_losses_again_and_again_keep_the_exact_program(ahead):
    """Where every bounded dispatch overflows, hardly one in MOST is bounded in the end; then one that holds resets."""
    repeats, flying, ran = Repeats(), [], []
    for _ in range(20 * MOST):
        exact = repeats.next()
        repeats.sent(exact)
        flying.append(exact)
        ran.append(exact)
        while len(flying) > ahead:
            exact = flying.pop(0)
            repeats.observe(not exact, exact)
    assert sum(not exact for exact in ran[-10 * MOST :]) <= 10 * (1 + ahead) + 1
    repeats.observe(False, exact=False)
    assert repeats.patience == 1
