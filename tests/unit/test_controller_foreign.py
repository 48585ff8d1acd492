"""What evals of others report, before it is kept."""

from __future__ import annotations

from math import inf, nan

from eval_service.contract.results import AlarmKind, Metric
from eval_service.controller.foreign import finite


def test_a_metric_that_is_no_number_is_left_out_and_told_and_an_error_that_is_none_is_not_known() -> None:
    given = {
        "acc": Metric(value=0.5, stderr=nan, low=-inf, high=inf, n=1),
        "perplexity": Metric(value=inf, n=3),
        "bleu": Metric(value=nan, n=3),
        "f1": Metric(value=0.25, stderr=0.0, n=4),
    }
    found, (alarm,) = finite(given)
    assert found == {"acc": Metric(value=0.5, n=1), "f1": given["f1"]}
    assert (alarm.kind, alarm.evidence) == (AlarmKind.NOT_FINITE, {"perplexity": "inf", "bleu": "nan"})
    assert "perplexity is inf, bleu is nan" in alarm.message
    assert finite(found) == (found, ())
