"""Findings: their text, the order of the rules, and the reports; each finding is reported once."""

import json
import math

from hypothesis import given, strategies as st

from hookdiff import Alarms, Finding, listed
from hookdiff.log.findings import error_if, judge, not_finite, percent, warning_if

HOT = Finding("warning", "hot", "70 degrees", "a fan")
BURNS = Finding("error", "burns")
FINE = Finding("ok", "20 degrees")


def test_the_text_has_a_line_for_each_part_that_is_given():
    assert str(HOT) == "hot\n  70 degrees\n  try a fan"
    assert str(BURNS) == "burns"
    assert str(Finding("info", "hot", "", "a fan")) == "hot\n  try a fan"


def test_the_first_rule_that_holds_decides():
    def found(degrees):
        return judge(
            f"{degrees} degrees",
            error_if(degrees > 100, "burns", "water"),
            warning_if(degrees > 60, "hot"),
            warning_if(degrees > 50, "warm", why="of the sun"),
            (math.isnan(degrees), HOT),
        )

    assert found(120) == Finding("error", "burns", "120 degrees", "water")
    assert found(70) == Finding("warning", "hot", "70 degrees")
    assert found(55) == Finding("warning", "warm", "of the sun")
    assert found(math.nan) == HOT
    assert found(20) == FINE


def test_a_finding_is_reported_once_and_again_after_it_was_over():
    alarms, findings = Alarms(), [None, HOT, HOT, FINE, HOT, None, HOT]
    news = [step for step, finding in enumerate(findings, 1) if alarms.news(step, "heat", finding)]
    assert news == [2, 5, 7]


def test_keys_are_independent_and_a_change_of_severity_is_reported():
    alarms = Alarms()
    assert [alarms.news(1, key, HOT) for key in ("a", "b", "a")] == [HOT, HOT, None]
    assert [alarms.news(2, "a", finding) for finding in (BURNS, BURNS, HOT)] == [BURNS, None, HOT]
    assert "a" in alarms
    assert alarms.news(3, "a", None) is None
    assert ("a" in alarms, "b" in alarms) == (False, True)


def test_a_finding_with_hysteresis_is_over_below_a_lower_threshold():
    alarms = Alarms()
    degrees = [70, 55, 70, 55, 40, 70]
    news = [alarms.news(step, "heat", HOT if d > 60 else None, over=d < 50) for step, d in enumerate(degrees)]
    assert news == [HOT, None, None, None, None, HOT]


def test_a_finding_is_reported_again_after_a_quiet_period():
    alarms = Alarms()
    assert [step for step in (1, 10, 20, 31, 40) if alarms.news(step, "heat", HOT, quiet=10)] == [1, 31]


def test_a_finding_is_reported_again_when_its_size_has_grown():
    alarms = Alarms()
    sizes = [1.0, 2.0, 3.9, 4.0, 15.0, 1.0, 16.0]
    assert [size for size in sizes if alarms.news(0, "heat", HOT, size=size, growth=4)] == [1.0, 4.0, 16.0]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([None, HOT, BURNS, FINE]), st.integers(0, 9)), max_size=30
    ),
    st.integers(0, 30),
)
def test_a_resumed_run_reports_what_the_whole_run_would(events, cut):
    whole, parts = Alarms(), Alarms()
    for step, (key, finding, size) in enumerate(events):
        if step == cut:
            state = json.loads(json.dumps(parts.state_dict()))
            parts = Alarms()
            parts.load_state_dict(state)
        options = {"quiet": 4, "size": size, "growth": 2.0, "over": None if size % 2 else size == 0}
        assert parts.news(step, key, finding, **options) == whole.news(step, key, finding, **options)
    assert parts.state_dict() == whole.state_dict()


def test_the_places_of_what_is_not_finite_are_listed():
    why = not_finite("inputs", 0.125, "other data", ["a", "b", "c", "d", "e", "f"]).why
    assert why.startswith("12.5% ")
    assert why.endswith(" a, b, c, d and 2 more")


def test_shares_are_percentages_and_long_lists_are_shortened():
    assert [percent(share) for share in (0.0, 0.1234567, 1.0)] == ["0%", "12.3%", "100%"]
    assert percent(math.nan) == "an unknown share"
    assert [listed([1, 2, 3], most) for most in (1, 2, 3)] == ["1 and 2 more", "1, 2 and 1 more", "1, 2, 3"]
