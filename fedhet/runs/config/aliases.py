"""YAML whose aliases would multiply it: a few lines can stand for more than any memory holds."""

from __future__ import annotations

import yaml

MOST_VALUES = 1_000_000
DEEPEST = 100


def unfolded(text: str) -> str:
    """Return the text of a YAML file that stays small when its aliases are written out.

    Raises:
        yaml.YAMLError: it does not, or cannot be read.
    """
    if "*" not in text:
        return text
    sizes: dict[str, int] = {}  # anchor -> how many values it stands for
    inside: list[tuple[str | None, int]] = []  # the anchors of what is open, and where it began
    values = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            sizes |= {anchor: values - before} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            values += sizes.get(event.anchor, MOST_VALUES)  # one that is open contains itself
        elif isinstance(event, yaml.NodeEvent):
            values += 1
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, values))
            elif event.anchor:
                sizes[event.anchor] = 1
        if values > MOST_VALUES or len(inside) > DEEPEST:
            raise yaml.YAMLError(
                f"with its aliases it has more than {MOST_VALUES} values, or more than {DEEPEST}"
                " within each other"
            )
    return text
