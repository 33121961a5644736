"""A name of a class stands for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict

from house_rules.source import PACKAGE, modules


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for module, tree in modules(PACKAGE).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}
