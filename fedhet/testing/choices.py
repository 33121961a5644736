"""Whether the file of a method or a plug-in and its class say the same."""

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

    It lists every option of the constructor with the constructor's default, and nothing else. All
    options are keyword-only. The class has the name of its file.

    Raises:
        AssertionError: saying what differs.
    """
    assert group in ("method", "plugin", "server_opt", "merge"), f"no check for the group {group}"
    assert catalogue.title(group, name), f"{group}/{name}.yaml: the first comment says what it is"
    node: Any = OmegaConf.create(catalogue.content(group, name))
    node = node.get(group, node)  # a file that also presets other groups' settings
    if node._target_ is None:
        return
    options: Any = OmegaConf.to_container(node)
    del options["_target_"]
    options.pop("defaults", None)
    cls = find_target(node)
    parameters = dict(inspect.signature(cls).parameters)
    parameters.pop("setting", None)
    assert set(options) == set(parameters), f"{group}/{name}.yaml and {cls.__name__} differ"
    for key, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, f"{cls.__name__}: {key}"
    if group == "server_opt":  # one class serves several of its files, with defaults of their own
        return
    assert options == {key: parameter.default for key, parameter in parameters.items()}, (
        f"{group}/{name}.yaml and {cls.__name__} have different defaults"
    )
    if group == "plugin":
        settings = config.compose(["method=fedavg", f"plugin=[{name}]"])
        (plugin,) = Job(settings, toy_task()).plugins
        assert plugin.name == name, f"{cls.__name__}.name is {plugin.name!r}, not {name!r}"
    elif not any("server_opt" in key for key in catalogue.fixed_choices(group, name)):
        assert cls.name == name, f"{cls.__name__}.name is {cls.name!r}, its file {name}.yaml"
