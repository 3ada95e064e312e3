"""Tables of a file of tools, and the errors in them."""

from pathlib import Path

import pytest

from jinfercept.errors import ConfigError, RequestError
from jinfercept.tools.load import load_tools
from tests.support.pretend import missing

HTTP = 'kind = "http"\nname = "web"\ndescription = "asks"\nurl = "https://example.com/"\n'
GOOD = f"[[tool]]\n{HTTP}\n"


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        ("", "is no list of tools; got tool"),
        ("[[tool]\n", "is no TOML"),
        (f'title = "mine"\n{GOOD}', "is no list of tools; got title"),
        (
            '[[tool]]\nname = "x"',
            "tool 1: kind says what it is; got ; fix: one of python, http, mcp, model, person",
        ),
        (f"{GOOD}timout_s = 3", "tool 1: no such key; got timout_s (did you mean 'timeout_s'?); fix: the keys are "),
        (GOOD.replace("[[tool]]", "[[tools]]"), "is no list of tools; got tool; fix: begin every tool by [[tool]]"),
        (f'{GOOD}colour = "red"', "tool 1: no such key; got colour; fix: the keys are timeout_s, "),
        ('[[tool]]\nkind = "http"\nname = "web"\nurl = "https://a.b/"', "tool 1: a key is missing; got no description"),
        (GOOD.replace("web", "web page"), "tool 1: name does not fit; got 'web page'"),
        (f"{GOOD}timeout_s = 0", "tool 1: timeout_s does not fit; got 0; fix: Input should be greater than 0"),
        (f"{GOOD}headers = {{a = 1}}", "tool 1: headers.a does not fit; got 1"),
        (
            f'{GOOD}headers = {{a = "${{NO_SUCH_VARIABLE}}"}}',
            "headers.a needs a variable that is not set; got NO_SUCH_",
        ),
        (f'{GOOD}parameters = {{type = "string"}}', "parameters are an object's schema"),
        (f'{GOOD}parameters = {{type = "object", properties = 3}}', "parameters.properties is no JSON schema; got 3"),
        (f'{GOOD}method = "DELETE"\nbody = {{a = 1}}', "DELETE has no body"),
        (f'{GOOD}parameters = {{type = "object"}}'.replace("com/", "com/{q}"), "are not declared; got q"),
        (GOOD.replace("example.com", "{host}"), "a host that the model chooses; got {host}; fix: say in allow_hosts"),
        (GOOD.replace("https://example.com/", "example.com"), "url is none"),
        (
            GOOD.replace("example.com", "localhost:8080"),
            'has to be allowed; got localhost; fix: allow_hosts = ["localhost"]',
        ),
        ('[[tool]]\nkind = "mcp"\nname = "shop"', "a command or a url; got kind, name"),
        (
            '[[tool]]\nkind = "mcp"\nname = "shop"\nurl = "http://a/"\nargs = ["x"]',
            "args, env and cwd belong to a command",
        ),
        (
            '[[tool]]\nkind = "model"\nname = "m"\ndescription = "d"',
            "at a base_url or at a path; got kind, name, description",
        ),
        ('[[tool]]\nkind = "model"\nname = "m"\ndescription = "d"\npath = "p"\nmodel = "x"', "belong to a base_url"),
        ('[[tool]]\nkind = "python"\nfunction = "os"', "function does not fit; got 'os'"),
        (
            '[[tool]]\nkind = "python"\nfunction = "no.such.module:f"',
            "no such function: No module named 'no'; got no.such.module:f",
        ),
        (
            '[[tool]]\nkind = "python"\nfunction = "math:sqrt"',
            "tool 1: the arguments of tool 'sqrt' have no JSON schema",
        ),
        ('[[tool]]\nkind = "python"\nfunction = "none.py:f"', "tool 1: there is no such file of tools"),
    ],
)
def test_a_mistake_says_where_what_got_and_fix(toml: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text(toml)
    with pytest.raises(ConfigError) as error:
        load_tools(tmp_path / "tools.toml")
    assert complaint in str(error.value)
    assert "tools.toml" in str(error.value)


def test_nothing_is_started_before_everything_is_checked(tmp_path: Path) -> None:
    started = tmp_path / "started"
    (tmp_path / "tools.toml").write_text(
        f'[[tool]]\nkind = "mcp"\nname = "shop"\ncommand = "touch"\nargs = ["{started}"]\n{GOOD}colour = "red"'
    )
    with pytest.raises(ConfigError, match="tool 2: no such key"):
        load_tools(tmp_path / "tools.toml")
    assert not started.exists()


def test_packages_that_are_missing_are_named_with_the_extra_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing(monkeypatch, "mcp", imported_by="jinfercept.tools.mcp_server")
    (tmp_path / "tools.toml").write_text('[[tool]]\nkind = "mcp"\nname = "shop"\ncommand = "x"')
    with pytest.raises(ConfigError, match=r"no package mcp; fix: pip install 'jinfercept\[tools\]'"):
        load_tools(tmp_path / "tools.toml")


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.toml").write_text(GOOD + GOOD)
    with pytest.raises(RequestError, match="two tools have one name; got web"):
        load_tools(tmp_path / "tools.toml")


def test_a_file_that_is_not_there_is_an_error_with_and_without_the_packages_of_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.toml").write_text('[[tool]]\nkind = "python"\nfunction = "none.py:f"')
    for has_packages in (True, False):
        if not has_packages:
            missing(monkeypatch, "mcp", imported_by="jinfercept.tools.mcp_server")
        for name in ("none.toml", "none.py", "tools.toml"):
            with pytest.raises(ConfigError, match="no such file of tools"):
                load_tools(tmp_path / name)
