"""Checks that the yaml file of a method or a plug-in agrees with its class."""

from __future__ import annotations

import inspect
from typing import Any

from omegaconf import OmegaConf

from fedhet.data.toy import toy_task
from fedhet.runs import config
from fedhet.runs.config import catalogue
from fedhet.runs.config.instantiation import find_target
from fedhet.runs.job import Job


def check_choice(group: str, name: str) -> None:
    """Check the file `<group>/<name>.yaml` of a method, a plug-in, a server optimiser or a merge.

    The file must list every option of the constructor with the constructor's default, and nothing
    else. All options must be keyword-only. The `name` of the class must be the name of the file.

    Raises:
        AssertionError: a rule is broken; the message says what differs.
    """
    assert group in ("method", "plugin", "server_opt", "merge"), f"no check for the group {group}"
    assert catalogue.title(group, name), f"{group}/{name}.yaml needs a first comment as its title"
    node: Any = OmegaConf.create(catalogue.content(group, name))
    node = node.get(group, node)  # a file that also presets other groups' settings
    if node._target_ is None:
        return
    options: Any = OmegaConf.to_container(node)
    del options["_target_"]
    options.pop("defaults", None)
    cls = find_target(node)
    parameters = dict(inspect.signature(cls).parameters)
    assert set(options) == set(parameters), f"{group}/{name}.yaml and {cls.__name__} differ"
    for key, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{cls.__name__}: {key}"
    if group == "server_opt":  # several files use one class, each with its own defaults
        return
    assert options == {key: parameter.default for key, parameter in parameters.items()}, (
        f"{group}/{name}.yaml and {cls.__name__} have different defaults"
    )
    if group == "plugin":
        (plugin,) = Job(config.compose(["method=fedavg", f"plugin=[{name}]"]), toy_task()).plugins
        assert plugin.name == name, f"{cls.__name__}.name is {plugin.name!r}, not {name!r}"
    elif not any("server_opt" in key for key in catalogue.fixed_choices(group, name)):
        assert cls.name == name, f"{cls.__name__}.name is {cls.name!r}, its file {name}.yaml"
