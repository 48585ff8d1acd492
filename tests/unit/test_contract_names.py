"""No name that is accepted can lead out of the root, and names survive being taken apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.contract import names
from eval_service.contract.errors import InvalidRequest
from tests.support.properties import steady

HEX = "0123456789abcdef"
DIGESTS = st.text(HEX, min_size=32, max_size=32)


@steady
@given(st.text(max_size=20) | st.text("ab./\\-_\0\n ", max_size=8))
def test_no_accepted_run_name_escapes_the_root(run: str) -> None:
    try:
        directory = names.run_dir("/root/of/runs", run)
    except InvalidRequest:
        return
    assert directory.parent == Path("/root/of/runs")
    assert os.path.normpath(directory) == str(directory)
    assert not directory.name.startswith(".")


@pytest.mark.parametrize("run", ["a", "Qwen3-0.6B_lr1e-5", "0", "x" * 128])
def test_ordinary_run_names_are_accepted(run: str) -> None:
    assert names.check_run(run) == run


@pytest.mark.parametrize("run", ["evals", "outbox"])
def test_a_run_named_as_a_runs_own_directory_is_refused_since_the_other_runs_deletion_would_take_it(run: str) -> None:
    with pytest.raises(InvalidRequest, match="can't name a run"):
        names.check_run(run)


@pytest.mark.parametrize(
    "run", ["", ".", "..", "a/b", "a/../b", "../a", "a..b", ".hidden", "a\n", "a b", "x" * 129, "é"]
)
def test_run_names_that_could_lead_elsewhere_are_refused_with_the_rule(run: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        names.check_run(run)
    assert caught.value.field == "run"
    assert caught.value.hint


@steady
@given(st.integers(0, 10**12), DIGESTS)
def test_a_published_name_can_be_taken_apart_again(step: int, digest: str) -> None:
    assert names.parse_step_dir(names.step_dir_name(step, digest)) == (step, digest[:8])


@pytest.mark.parametrize(
    "name",
    [
        "step_1",
        "step_01-00000000",
        "step_-1-00000000",
        "step_1-0000000",
        "step_1-0000000G",
        "step_1-00000000\n",
        "step_٣-00000000",
        ".partial-00000000",
        "xstep_1-00000000",
    ],
)
def test_no_other_name_is_taken_for_a_published_one(name: str) -> None:
    assert names.parse_step_dir(name) is None


def test_a_negative_step_names_the_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        names.step_dir_name(-1, "0" * 32)
    assert caught.value.field == "step"


@pytest.mark.parametrize("nonce", ["", "../x", "A" * 8, "a" * 33, "0123456789\n"])
def test_only_a_nonce_names_a_partial_or_trash_directory(nonce: str) -> None:
    for make in (names.partial_name, names.trash_name):
        with pytest.raises(ValueError, match="nonce"):
            make(nonce)
