"""Verbs from requests: fields become options, and a request knows which of them were given."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from pipedejavu.cli.verb import add_verb


@dataclass(frozen=True)
class Request:
    name: Annotated[str, typer.Argument(metavar="NAME")]
    size: Annotated[int | None, typer.Option(help="Its size.")] = None
    is_loud: Annotated[bool, typer.Option("--loud")] = False
    explicit: frozenset[str] = frozenset()


def test_a_request_has_the_options_and_which_were_given() -> None:
    app, requests = typer.Typer(), list[Request]()
    app.command()(lambda: None)  # with one verb alone typer leaves its name out
    add_verb(app, "do", Request, requests.append, "Do it.")
    done = CliRunner().invoke(app, ["do", "it", "--size", "3"])
    assert done.exit_code == 0, done.output
    assert requests == [Request("it", 3, False, frozenset({"name", "size"}))]
    shown = CliRunner().invoke(app, ["do", "--help"]).output
    assert "Do it." in shown
    assert "Its size." in shown
    assert "explicit" not in shown
