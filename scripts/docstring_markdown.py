"""Docstrings as Markdown, for scripts/methods_page.py."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

LIST_ITEM = r"[-*] |\d+\. "
MESSAGE_KEYS = ("down", "up", "client keeps", "server keeps")


def render(docstring: str) -> list[str]:
    """The blocks of a docstring: paragraphs, lists, code blocks, and tables of messages."""
    return [_render(*block) for block in _blocks(docstring)]


def wrapped(text: str) -> str:
    """The text in lines of at most 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    """The text as a cell of a table."""
    return text.replace("|", "\\|")


def _blocks(docstring: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of the blocks of a docstring; kinds are "prose", "messages" and "literal".

    Indented text is literal, or the messages if it says what goes "down:". Successive blocks of one
    kind other than prose belong together, even with a blank line between them.
    """
    kind = ""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip("\n")):
        for text in _by_indentation(paragraph):
            this = "prose"
            if text.startswith("    "):
                is_message = re.search(rf"\b({'|'.join(MESSAGE_KEYS)}):", text)
                this = "messages" if is_message else "literal"
            if lines and (this != kind or this == "prose"):
                yield kind, "\n".join(lines)
                lines = []
            lines += ([""] if lines else []) + text.split("\n")
            kind = this
    if lines:
        yield kind, "\n".join(lines)


def _by_indentation(paragraph: str) -> Iterator[str]:
    """The parts of a paragraph that are indented or not; one with a list is a single part."""
    if re.search(rf"(?m)^({LIST_ITEM})", paragraph):
        yield paragraph
        return
    for _, lines in groupby(paragraph.split("\n"), lambda line: line.startswith("    ")):
        yield "\n".join(lines)


def _render(kind: str, text: str) -> str:
    """A block of a docstring as Markdown."""
    if kind == "prose":
        return _prose(text)
    table = _messages(text) if kind == "messages" else ""
    return table or f"```text\n{textwrap.dedent(text)}\n```"


def _prose(text: str) -> str:
    """A paragraph, with a list only where one begins it or follows a colon.

    Any other line that looks like a list item or a heading was wrapped there by chance.
    """
    lines: list[str] = []
    before = ":"
    in_list = False
    for line in text.split("\n"):
        in_list = bool(in_list or (before.endswith(":") and re.match(LIST_ITEM, line)))
        escaped = re.sub(r"^(\d*)([-+*#.)])(?= )", r"\1\\\2", line)
        lines.append(line if in_list else escaped)
        before = line
    return "\n".join(lines)


def _messages(text: str) -> str:
    """A table of what travels and what is kept, or "" where the text has another form.

    Each key of MESSAGE_KEYS is followed by a colon and its value. A word before "down:" on the same
    line is the phase. What is kept is said for each phase, or once after the last.
    """
    rows: list[dict[str, str]] = []
    tokens = list(re.finditer(rf"(?<!\w)({'|'.join(MESSAGE_KEYS)}):", text))
    ends = []
    for token in tokens:
        start = token.start()
        if token[1] == "down":
            start = text.rfind("\n", 0, start) + 1
            rows.append({"phase": text[start : token.start()].strip()})
        ends.append(start)
        if not rows or token[1] in rows[-1] or ":" in rows[-1]["phase"]:
            return ""
        rows[-1][token[1]] = ""
    if not rows or text[: ends[0]].strip():
        return ""
    row = -1
    for token, end in zip(tokens, [*ends[1:], len(text)], strict=True):
        row += token[1] == "down"
        rows[row][token[1]] = cell(" ".join(text[token.end() : end].split()).rstrip(";"))
    kept: dict[str, str] = {}
    if len(rows) > 1 and not any("keeps" in key for row in rows[:-1] for key in row):
        kept = {key: rows[-1].pop(key) for key in MESSAGE_KEYS[2:] if key in rows[-1]}
    columns = [key for key in ("phase", *MESSAGE_KEYS) if any(row.get(key) for row in rows)]
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(key, "") for key in columns] for row in rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    sentences = [f"The {key}: {value}." for key, value in kept.items()]
    return "\n\n".join([table, wrapped(" ".join(sentences))]) if sentences else table
