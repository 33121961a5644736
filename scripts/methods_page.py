"""Builds docs/methods.md, the page about all methods.

    python scripts/methods_page.py            write the page
    python scripts/methods_page.py --check    exit with code 1 if the page is not up to date

A section has three sources: the docstring of the method's module (paper, equations, messages,
deviations), its options in conf/ with defaults and help, and the text that is written by hand in
docs/methods/ (idea, measurements, commands). Methods that share a module share a section.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's fedhet, wherever the command is started

from docstring_markdown import cell, render, wrapped  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from fedhet.config import catalogue  # noqa: E402

COMMAND = "python scripts/methods_page.py"
PAGE = ROOT / "docs" / "methods.md"
NOTES = ROOT / "docs" / "methods"
SERVER_OPT = "fedhet.core.server_opt"
HEADER = f"""\
# Methods

*`{COMMAND}` (`make docs`) generates this page from the docstrings in
fedhet/methods/, the options in conf/, and the texts in docs/methods/. Edit those instead.*
"""


@dataclass(frozen=True)
class Section:
    """The methods that one module defines, or the plug-ins of a module without methods.

    Attributes:
        module: the module's dotted name.
        methods: their names in conf/method.
        plugins: the plug-ins of the same module, by their names in conf/plugin.
        server_opts: the server optimisers that define the methods.
    """

    module: str
    methods: list[str]
    plugins: list[str]
    server_opts: list[str]

    @property
    def title(self) -> str:
        """Their names as their papers write them."""
        names = [text.partition(":")[0] for text in self.titles]
        return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)

    @property
    def titles(self) -> list[str]:
        """The titles of the methods, or else of the plug-ins."""
        group = "method" if self.methods else "plugin"
        return [catalogue.title(group, name) for name in self.methods or self.plugins]

    @property
    def choices(self) -> list[str]:
        """What selects them on the command line."""
        return [
            *(f"method={method}" for method in self.methods),
            *(f"plugin=[{plugin}]" for plugin in self.plugins),
            *(f"server_opt={optimizer}" for optimizer in self.server_opts),
        ]

    @property
    def options(self) -> list[tuple[str, str]]:
        """(path below conf/, prefix of the options on the command line)."""
        return [
            *((f"method/{method}", "method") for method in self.methods),
            *((f"plugin/{plugin}", f"plugin.{plugin}") for plugin in self.plugins),
            *((f"server_opt/{optimizer}", "server_opt") for optimizer in self.server_opts),
        ]

    @property
    def source(self) -> Path:
        """The file with the module's docstring."""
        path = ROOT.joinpath(*self.module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    @property
    def notes(self) -> Path:
        """The file with the text that is written by hand."""
        return NOTES / f"{self.module.rpartition('.')[2]}.md"


def sections() -> list[Section]:
    """All sections: FedAvg, the server optimisers, then the others in alphabetical order."""
    optimizers = [name for name in catalogue.built_in("server_opt") if name != "none"]
    by_module: dict[str, Section] = {}
    for method in catalogue.built_in("method"):
        server_opts = [method] if method in optimizers else []
        module = SERVER_OPT if server_opts else _module("method", method)
        section = by_module.setdefault(module, Section(module, [], [], []))
        section.methods.append(method)
        section.server_opts.extend(server_opts)
    for plugin in catalogue.built_in("plugin"):
        module = _module("plugin", plugin)
        by_module.setdefault(module, Section(module, [], [], [])).plugins.append(plugin)
    first = [by_module.pop("fedhet.methods.fedavg"), by_module.pop(SERVER_OPT)]
    return [*first, *sorted(by_module.values(), key=lambda section: section.title.lower())]


def _module(group: str, choice: str) -> str:
    """The module that the choice's `_target_` names."""
    node = OmegaConf.load(catalogue.CONF / group / f"{choice}.yaml")
    target: str = node.get("method", node)["_target_"]
    return target.rpartition(".")[0]


def page() -> str:
    """The text of docs/methods.md.

    Raises:
        SystemExit: a file in docs/methods/ belongs to no section, or a section has none.
    """
    every = sections()
    expected = {"README.md", "introduction.md", *(section.notes.name for section in every)}
    present = {path.name for path in NOTES.glob("*.md")}
    problems = [
        *(
            f"missing: docs/methods/{name} (write it, then run {COMMAND})"
            for name in sorted(expected - present)
        ),
        *(f"belongs to no method: docs/methods/{name}" for name in sorted(present - expected)),
    ]
    if problems:
        raise SystemExit("\n".join(problems))
    introduction, details = _notes(NOTES / "introduction.md")
    parts = [HEADER, introduction, _contents(every), details, *map(_section, every)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _contents(every: list[Section]) -> str:
    """A table with a line for each method."""
    lines = ["| method | what it does |", "|---|---|"]
    for section in every:
        anchor = re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
        for title in section.titles:
            name, _, about = title.partition(": ")
            lines.append(f"| [{name}](#{anchor}) | {cell(about)} |")
    return "\n".join(lines)


def _section(section: Section) -> str:
    """One section of the page."""
    idea, details = _notes(section.notes)
    docstring = ast.get_docstring(ast.parse(section.source.read_text(encoding="utf-8"))) or ""
    blocks = render(docstring)
    source = section.source.relative_to(ROOT).as_posix().removesuffix("/__init__.py")
    choices = ", ".join(f"`{choice}`" for choice in section.choices)
    options = [_options(path, prefix) for path, prefix in section.options]
    parts = [
        f"## {section.title}",
        wrapped(f"{choices}; [{source}](../{source})"),
        *blocks[:1],
        idea,
        *blocks[1:],
        "### Options" if any(options) else "",
        *options,
        details,
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part)


def _notes(path: Path) -> tuple[str, str]:
    """The text before the first heading, and the rest; headings move down in a method's section."""
    text = "\n" + path.read_text(encoding="utf-8")
    before, heading, after = text.partition("\n## ")
    details = f"{heading.strip()} {after}" if heading else ""
    if path.name != "introduction.md":
        details = re.sub(r"(?m)^(?=##+ )", "#", details)
    return before, details


def _options(path: str, prefix: str) -> str:
    """The options in a file below conf/, with their defaults and comments; empty if none has help.

    Help texts often come in two parts, a comment at the end of the line and one above it, so the
    file is shown as it is, without what is there for Hydra only.
    """
    if not catalogue.settings(path):
        return ""
    text = (catalogue.CONF / f"{path}.yaml").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^# @package .*\n", "", text)
    text = re.sub(r"\A# .*\n", "", text)  # the title
    text = re.sub(r"(?m)^defaults:\n(?: +.*\n)+", "", text)
    text = re.sub(r"(?m)^\w+: [^#\n]+\n", "", text)  # settings without help
    choice = f" of `{path.replace('/', '=')}`" if prefix == "server_opt" else ""
    return f"`{prefix}.<option>`{choice}:\n\n```yaml\n{text.strip()}\n```"


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/methods.md is not up to date; run {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
