"""The distributions agree with scipy and statsmodels over the whole range that points have."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from statsmodels.stats.proportion import proportion_confint

from eval_service.suites.distributions import incomplete_beta, sign_two_sided, t_quantile, t_two_sided, wilson

sizes = st.integers(1, 200_000)


@settings(deadline=None)
@given(st.floats(0.5, 1e5), st.floats(0.5, 1e5), st.floats(0, 1))  # half a degree of freedom is the least asked for
def test_the_incomplete_beta_function_is_scipys(a: float, b: float, x: float) -> None:
    assert math.isclose(incomplete_beta(a, b, x), special.betainc(a, b, x), rel_tol=1e-7, abs_tol=1e-12)


@settings(deadline=None)
@given(st.floats(-50, 50), sizes)
def test_students_t_is_scipys(t: float, df: int) -> None:
    assert math.isclose(t_two_sided(t, df), 2 * stats.t.sf(abs(t), df), rel_tol=1e-7, abs_tol=1e-12)


@pytest.mark.parametrize("df", [1, 2, 3, 10, 100, 10_000, 200_000])
def test_the_quantile_of_students_t_is_scipys(df: int) -> None:
    assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)


@settings(deadline=None)
@given(st.data())
def test_the_sign_test_is_scipys_binomial_test(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3000))
    successes = data.draw(st.integers(0, n))
    assert math.isclose(
        sign_two_sided(successes, n), stats.binomtest(successes, n).pvalue, rel_tol=1e-8, abs_tol=1e-200
    )


def test_of_no_toss_nothing_is_known() -> None:
    assert sign_two_sided(0, 0) == 1.0


@settings(deadline=None)
@given(st.data())
def test_wilsons_interval_is_statsmodels(data: st.DataObject) -> None:
    n = data.draw(sizes)
    right = data.draw(st.integers(0, n))
    low, high = wilson(right / n, n)
    expected = proportion_confint(right, n, method="wilson")
    assert (low, high) == pytest.approx(expected, abs=1e-12)
    assert 0.0 <= low <= right / n <= high <= 1.0
