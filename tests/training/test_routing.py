import numpy as np
import pytest

from kimi_jax.training.routing import Distinct, count_distinct, fit_diversity


def test_distinct_experts_by_hand():
    chosen = np.asarray([[[0, 1], [1, 2]], [[3, 3], [4, 4]]])  # 4 is past the last of 4
    assert count_distinct(chosen, 4).tolist() == [3, 1]


@pytest.mark.parametrize("diversity", [0.0, 0.3, 1.0])
def test_the_fit_recovers_a_known_diversity(diversity):
    counts = [[10, 20, 30, 40], [25, 25, 25, 25]]
    popularity = np.minimum(1, np.asarray(counts) * 2 / 100)
    distinct = []
    for rows in (1, 2, 8, 16):
        touched = (1 - (1 - popularity) ** (1 + diversity * (rows - 1))).sum(1).mean()
        distinct.append(Distinct(rows, float(touched), 0.0, 0.0))
    assert fit_diversity(counts, distinct, 2) == pytest.approx(diversity, abs=2e-3)
