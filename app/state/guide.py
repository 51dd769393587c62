"""The guide: its chapters as passages and as HTML."""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token

from backend.utils.places import project_root

CHAPTERS = ("grpo.md", "settings.md", "charts.md", "../judges.md", "../glossary.md")
CONTENTS, GLOSSARY = CHAPTERS[0], CHAPTERS[-1]
PAGE = "app:"
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
_KEY = re.compile(r" \(`\w+`\)$")
_HEADING = re.compile(r"^(#{1,3}) (.+)$")
_TERM = re.compile(r"^- \*\*(.+?)\*\*: (.+)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = "```"


@dataclass(slots=True)
class Passage:
    """A heading without a setting's key, or a term, and its text. `level`: 1 chapter, 2 section, 3 entry."""

    title: str
    level: int
    place: str
    text: str


def folder() -> Path:
    return project_root() / "docs" / "guide"


@cache
def chapters() -> tuple[tuple[Passage, ...], ...]:
    return tuple(tuple(_passages(name)) for name in CHAPTERS)


def found(typed: str) -> list[Passage]:
    """The passages with all words, those with the words in their title or key first."""
    words, in_head, in_text = typed.lower().split(), list[Passage](), list[Passage]()
    for passage in (passage for chapter in chapters() for passage in chapter):
        head = f"{passage.title} {passage.place}".lower()
        if all(word in head for word in words):
            in_head.append(passage)
        elif all(word in f"{head} {passage.text.lower()}" for word in words):
            in_text.append(passage)
    return in_head + in_text


def place_of(kind: Literal["setting", "chart", "health"], name: str) -> str:
    """Raises KeyError if the guide has no such paragraph. `name`: a setting's key, a chart's title, a rule's code."""
    anchor = "-".join(re.findall(r"[a-z0-9]+", name.lower())) if kind == "chart" else name
    places = {passage.place.partition("#")[2]: passage.place for chapter in chapters() for passage in chapter}
    return places[f"{kind}-{anchor}"]


def resolved(link: str, chapter: str) -> str:
    if ":" in link:
        return link
    file, _, anchor = link.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(chapter), file)) if file else chapter
    place = place.removeprefix("../guide/")
    return f"{place}#{anchor}" if anchor else place


def chapter_html(chapter: str) -> str:
    """A document as HTML for Qt's text widgets. Raises OSError."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    markdown.add_render_rule("fence", _code_html)
    tokens = markdown.parse((folder() / chapter).read_text(encoding="utf-8"))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.attrs["class"], token.tag = token.tag, "div"
        for child in token.children or ():
            if child.type == "html_inline":
                child.content = child.content.replace("<a id=", "<a name=")
            elif child.type == "image":  # does not ship with the app
                child.type, child.content = "text", ""
            elif child.type == "text":
                child.content = re.sub(r"^\[ \] ", "☐ ", child.content)
            elif child.type == "link_open" and not is_shown(resolved(str(child.attrs["href"]), chapter)):
                child.attrs.pop("href")
    return markdown.renderer.render(tokens, markdown.options, {})


def documents() -> set[str]:
    """The files, relative to docs, that have to ship with the app."""
    linked = (link for name in CHAPTERS for link in _LINK.findall((folder() / name).read_text(encoding="utf-8")))
    outside = {link.partition("#")[0].removeprefix("../") for link in linked if link.startswith("../")}
    return outside | {posixpath.normpath(f"guide/{name}") for name in CHAPTERS}


def is_shown(place: str) -> bool:
    return ":" in place or (folder() / place.partition("#")[0]).is_file()


def _code_html(_renderer: object, tokens: Sequence[Token], index: int, *_: object) -> str:
    code = escape(tokens[index].content.rstrip("\n"))
    return f'<table width="100%" class="code"><tr><td><pre>{code}</pre></td></tr></table>\n'


def _passages(name: str) -> list[Passage]:
    passages: list[Passage] = []
    is_code = False
    for line in (folder() / name).read_text(encoding="utf-8").splitlines():
        is_code ^= line.startswith(_FENCE)
        heading = None if is_code else _HEADING.match(line)
        if heading is not None:
            anchor = _ANCHOR.search(heading[2])
            title = _KEY.sub("", _ANCHOR.sub("", heading[2])).replace("`", "")
            passages.append(Passage(title, len(heading[1]), f"{name}#{anchor[1]}" if anchor else name, ""))
        elif term := _TERM.match(line):
            passages.append(Passage(term[1], 3, passages[-1].place, term[2]))
        elif passages:
            passages[-1].text += f"{line}\n"
    for passage in passages:
        passage.text = passage.text.strip()
    return passages
