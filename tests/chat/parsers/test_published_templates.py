"""Templates of published models show tools, and calls in their formats are read back, as `docs/templates.md` says."""

import pytest

from tests.support.template_table import committed, published_templates, row_of

ROWS = committed()


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """The sources by name."""
    return published_templates()


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_table_has_every_template(templates: dict[str, str]) -> None:
    assert {*ROWS} == {*templates}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ROWS)
def test_the_table_says_what_a_template_does(templates: dict[str, str], name: str) -> None:
    assert row_of(name, templates[name]).line == ROWS[name]


def test_every_template_in_the_table_takes_a_call_that_is_read_back() -> None:
    for line in ROWS.values():
        _, _, rendered, tools, form, grammar, own, *_ = (cell.strip() for cell in line.split("|"))
        assert rendered == grammar == own == "yes", line
        assert tools in ("yes", "system message"), line
        assert form != "none", line
