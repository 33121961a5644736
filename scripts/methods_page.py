"""Make the page about all methods, the tables of methods, and conf/combinations.yaml.

    python scripts/methods_page.py

A section of pages/methods.md has three sources: the docstring of the method's module (paper,
equations, messages, deviations), its options in conf/ with defaults and help, and the hand-written
text in docs/methods/ (idea, measurements, commands), if there is one. Methods that share a module
share a section. The tables of docs/methods/README.md and docs/features.md come from the comments at
the top of the files in conf/. For conf/combinations.yaml, the script tries every method with every
plug-in, and writes down which plug-ins a method refuses.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # use this checkout's fedhet, wherever the command is started

from fedhet.runs.cli import help as cli_help  # noqa: E402
from fedhet.runs.config import catalogue  # noqa: E402

NOTES = ROOT / "docs" / "methods"
FIVE = ("fednorm", "fedlex", "fedgmm", "fedsa", "feddisk", "feddiskab")  # from the five papers
MARK = "<!-- {}: made by `make docs` -->\n"  # stands before a table; END stands after it
END = "<!-- end -->"
PAPER = re.compile(r"(?m)^# Paper: (.*)\n")
SERVER_OPT = "fedhet.core.server.server_opt"
Choices = list[tuple[str, str]]  # group and name


def sections() -> dict[str, Choices]:
    """Return the choices that each module defines: FedAvg, server optimisers, then by title."""
    found: dict[str, Choices] = defaultdict(list)
    for group in ("method", "plugin", "server_opt"):
        for name in catalogue.built_in(group):
            if name != "none":
                found[module_of(group, name)].append((group, name))
    first = ("fedhet.methods.fedavg", SERVER_OPT)
    order = sorted(found, key=lambda module: (module not in first, title(found[module]).lower()))
    return {module: found[module] for module in order}


def module_of(group: str, name: str) -> str:
    """Return the module that explains a choice.

    Server optimisers, and the methods with their names, share one module.
    """
    if name in catalogue.built_in("server_opt"):
        return SERVER_OPT
    return (catalogue.target(group, name) or "").rpartition(".")[0]


def titles(choices: Choices) -> list[str]:
    """Return the titles in conf/ of the methods, or of the plug-ins if there are no methods."""
    group = choices[0][0]
    return [catalogue.title(group, name) for kind, name in choices if kind == group]


def title(choices: Choices) -> str:
    """Return the names of the choices, written as in their papers."""
    names = [text.partition(":")[0] for text in titles(choices)]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def notes(module: str) -> Path:
    """Return the file with the hand-written text."""
    return NOTES / f"{module.rpartition('.')[2]}.md"


def page() -> str:
    """Return the text of the page.

    Raises:
        SystemExit: a file in docs/methods/ belongs to no method.
    """
    every = sections()
    known = {"README.md", *(notes(module).name for module in every)}
    present = {path.name for path in NOTES.glob("*.md")}
    if wrong := [f"docs/methods/{name}" for name in sorted(present - known)]:
        raise SystemExit(f"these files belong to no method: {', '.join(wrong)}")
    parts = [
        *_notes(NOTES / "README.md"),
        *(_section(module, choices) for module, choices in every.items()),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _section(module: str, choices: Choices) -> str:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    # A docstring is Markdown, in which a code block needs a blank line above.
    first, _, rest = re.sub(r"(?m)^(\S.*)\n(?=    )", r"\1\n\n", docstring).partition("\n\n")
    idea, details = _notes(notes(module))
    chosen = ", ".join(
        f"`plugin=[{name}]`" if group == "plugin" else f"`{group}={name}`"
        for group, name in choices
    )
    options = [text for group, name in choices if (text := _options(group, name))]
    place = source.relative_to(ROOT).as_posix()
    head = f"## {title(choices)}\n\n{chosen}; [{place}](../{place})"
    parts = [head, first, idea, rest, *(["### Options"] if options else []), *options, details]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def _notes(path: Path) -> tuple[str, str]:
    """Return the text before the first `##` heading, and the rest.

    For a method's section, headings move one level down, and the title is left out, because the
    page has its own.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    text = re.sub(r"\]\((\w+\.md)", r"](../docs/methods/\1", text.replace("](../", "](../docs/"))
    before, heading, after = f"\n{text}".partition("\n## ")
    details = f"{heading.strip()} {after}" if heading else ""
    down = path.name != "README.md"
    before = re.sub(r"\A\n# .*\n", "", before) if down else before
    return before, re.sub(r"(?m)^(?=##+ )", "#", details) if down else details


def _options(group: str, name: str) -> str:
    """Return the options in a file of conf/, with defaults and comments; "" if none has help.

    Help texts often have two parts, a comment above the line and a comment at its end. So the page
    shows the file itself, without the lines that only Hydra needs.
    """
    if not catalogue.settings(f"{group}/{name}"):
        return ""
    text = (catalogue.CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^# @package .*\n", "", text)
    text = PAPER.sub("", re.sub(r"\A# .*\n", "", text))  # without the title
    text = re.sub(r"(?m)^defaults:\n(?: +.*\n)+", "", text)
    text = re.sub(r"(?m)^\w+: [^#\n]+\n", "", text)  # settings without help
    prefix = f"plugin.{name}" if group == "plugin" else group
    choice = f" of `{group}={name}`" if group == "server_opt" else ""
    return f"`{prefix}.<option>`{choice}:\n\n```yaml\n{text.strip()}\n```"


# ---- the tables
def table() -> str:
    """Return the table of docs/methods/README.md, with links to the methods' pages.

    First come the methods of the five papers, then the other methods, then the plug-ins.
    """
    methods = catalogue.built_in("method")
    plugins = [name for name in catalogue.built_in("plugin") if name not in methods]
    rows = [_row(name) for name in (*FIVE, *(name for name in methods if name not in FIVE))]
    rows += [
        f"| {_linked('plugin', name, f'plugin=[{name}]')} | {catalogue.title('plugin', name)} |"
        for name in plugins
    ]
    return "\n".join(["| method | what it does |", "|---|---|", *rows])


def _row(name: str) -> str:
    about = catalogue.title("method", name).partition(": ")[2]
    head = PAPER.search((catalogue.CONF / "method" / f"{name}.yaml").read_text(encoding="utf-8"))
    paper = head[1] if head else ""
    if paper.startswith("https://"):
        about = re.sub(r" \(([^()]*\d{4})\)$", rf" ([\1]({paper}))", about)
    elif paper:
        about = f"{about}: *{paper}*"
    also = f", `plugin=[{name}]`" if name in catalogue.built_in("plugin") else ""
    if name in catalogue.built_in("server_opt"):
        also = f", `server_opt={name}`"
    return f"| {_linked('method', name, name)}{also} | {about} |"


def _linked(group: str, name: str, text: str) -> str:
    """Return the text as code, as a link to the page of the choice if there is one."""
    page = notes(module_of(group, name))
    return f"[`{text}`]({page.name})" if page.exists() else f"`{text}`"


def features(group: str, choice: str) -> str:
    """Return the table of a group for docs/features.md; equal pages and tests share a row.

    Args:
        group: the group in conf/, such as "method".
        choice: the setting that selects a choice, as a format string such as "method={}".
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name in catalogue.built_in(group):
        page = notes(module_of(group, name))
        test, *_ = [
            *sorted((ROOT / "tests" / "methods").glob(f"test_{name}*.py")),
            ROOT / "tests" / "maths" / "test_server_opt.py",
        ]
        if page.exists():
            place = f"[methods/{page.name}](methods/{page.name})"
        else:
            place = f"[{page.stem}.py](../fedhet/methods/{page.stem}.py)"
        found[f"{place} | {test.relative_to(ROOT).as_posix()}"].append(f"`{choice.format(name)}`")
    rows = [f"| {', '.join(names)} | {place} |" for place, names in found.items()]
    return "\n".join(["| feature | page | test |", "|---|---|---|", *rows])


def tables() -> dict[Path, str]:
    """Return the files with tables of methods -> their text with up-to-date tables."""
    features_page = ROOT / "docs" / "features.md"
    found: dict[Path, str] = {}
    for path, name, made in (
        (NOTES / "README.md", "methods", table()),
        (features_page, "methods", features("method", "method={}")),
        (features_page, "plugins", features("plugin", "plugin=[{}]")),
    ):
        found[path] = _with(found.get(path) or path.read_text(encoding="utf-8"), name, made)
    return found


def _with(text: str, name: str, made: str) -> str:
    """Return the text with the table `made` inserted at the mark with this name."""
    before, mark, rest = text.partition(MARK.format(name))
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise SystemExit(f"no table has the mark {MARK.format(name).strip()}")
    return f"{before}{mark}{made}\n{end}{after}"


def write_tables() -> None:
    """Bring the tables up to date."""
    for path, text in tables().items():
        path.write_text(text, encoding="utf-8")


def combinations() -> str:
    """Return the text of conf/combinations.yaml. It takes a minute, because all pairs are built."""
    methods, plugins = catalogue.built_in("method"), catalogue.built_in("plugin")
    found = {m: {p: cli_help.refusal(m, p) for p in plugins} for m in methods}
    return yaml.safe_dump(found, width=1000)


if __name__ == "__main__":
    cli_help.KNOWN.write_text(combinations(), encoding="utf-8")
    write_tables()
    (ROOT / "pages").mkdir(exist_ok=True)
    (ROOT / "pages" / "methods.md").write_text(page(), encoding="utf-8")
    print(f"the page is {ROOT / 'pages' / 'methods.md'}")
