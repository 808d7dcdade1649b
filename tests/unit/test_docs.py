"""What the documentation tells people to type exists, and what it points to is there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from kvduplex.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"```[^\n]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
TARGET = re.compile(r"(?:^|[\s;&(])make ((?:[a-z][a-z0-9-]*[ ]?)+)")
COMMAND = re.compile(r"(?:^|[\s/;&(])kvduplex ((?:[a-z][a-z0-9-]*[ ]?)+)")
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")

# Commands whose code is imported when they are called, and where it is.
DELEGATES = {
    "serve": "kvduplex.serve",
    "doctor": "kvduplex.doctor",
    "bench": "kvduplex_bench.app",
    "model": "kvduplex.model_command",
    "launch": "kvduplex.ec2.command",
    "node": "kvduplex.node.command",
}


def code_of(page: Path) -> str:
    """Text of every fenced block and inline code span of a page, one a line."""
    return "\n".join(block or span for block, span in CODE.findall(page.read_text()))


def targets() -> set[str]:
    """Every target of the Makefile."""
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def resolve(words: list[str]) -> str | None:
    """The first word that is no command of ours, or None; stops at the first command that takes arguments."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("kvduplex", [], resilient_parsing=True)
    if words and words[0] in DELEGATES:
        command = typer.main.get_command(import_module(DELEGATES[words[0]]).app)
        words = words[1:]
    for word in words:
        if not hasattr(command, "get_command"):
            return None
        found = command.get_command(context, word)
        if found is None:
            return word
        command = found
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_named_in_the_docs_exist(page: Path) -> None:
    code = code_of(page)
    missing = [f"make {name}" for names in TARGET.findall(code) for name in names.split() if name not in targets()]
    for words in COMMAND.findall(code):
        unknown = resolve(words.split())
        if unknown is not None:
            missing.append(f"kvduplex {words}: no command {unknown!r}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert not [link for link in links if not (page.parent / link).resolve().exists()]


def test_every_page_is_in_the_navigation() -> None:
    named = (ROOT / ".mkdocs.yml").read_text()
    assert not [p for p in (ROOT / "docs").rglob("*.md") if str(p.relative_to(ROOT / "docs")) not in named]


def test_the_check_itself_notices_a_wrong_command() -> None:
    assert resolve(["serve", "cpu"]) is None
    assert resolve(["serve", "toaster"]) == "toaster"
    assert TARGET.findall("make serve-cpu MODEL=x")[0].split() == ["serve-cpu"]
    assert resolve(["bench", "smoke"]) is None
    assert resolve(["bench", "nothing"]) == "nothing"
    assert resolve(["toast"]) == "toast"
