"""The page of model families shows the results on record."""

from family_table import LIMIT, OUTCOMES, PAGE, read_record, render_page, turn


def test_the_page_is_made_of_the_record() -> None:
    results = read_record()
    assert PAGE.read_text(encoding="utf-8") == render_page(results)


def test_every_result_has_what_its_outcome_needs() -> None:
    for result in read_record():
        assert result.outcome in OUTCOMES
        assert bool(result.message) == (result.outcome in ("refused", "not built")), result
        if result.outcome == "served":
            assert result.difference is not None
            assert result.difference <= LIMIT, result
        if result.outcome == "differs":
            assert result.difference is not None
            assert result.difference > LIMIT, result


def test_turns_are_of_different_results() -> None:
    assert len(set(turn(600, 20))) == 20
    assert all(0 <= index < 7 for index in turn(7, 3))
