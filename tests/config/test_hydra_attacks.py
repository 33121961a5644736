"""Ways to get past the checks of Hydra's settings and of `_target_`: each is refused.

Nothing may be called, written or truncated, by a file, a run from elsewhere, or an override of a
run that Hydra does not drive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from composing import check_overrides
from hydra.core.override_parser.types import Override

from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue, compose, composition, instantiation
from fedhet.runs.config.composition import Bases
from fedhet.runs.config.instantiation import find

CALLBACK = "+hydra.callbacks.x="
HANDLERS = "+hydra.job_logging.handlers="
# what is tried: the override
CALLS = {
    "walk through logging to os.system": f"{CALLBACK}{{_target_: logging.os.system, command: ls}}",
    "walk to open, which truncates": f"{CALLBACK}{{_target_: logging.io.open, file: v, mode: w}}",
    "handler as callback": f"{CALLBACK}{{_target_: logging.FileHandler, filename: v, mode: w}}",
    "walk to exec": f"{CALLBACK}{{_target_: logging.os.execlp, _args_: [ls, ls]}}",
    "call a method that is found by name": (
        f"{CALLBACK}{{_target_: hydra._internal.utils.run_and_report,"
        " func: {_target_: hydra.utils.get_method, path: os.abort}}"
    ),
    "import by hydra.utils": f"{CALLBACK}{{_target_: hydra.utils.get_object, path: antigravity}}",
    "recursion": f"{CALLBACK}{{_target_: hydra.utils.call, config: {{a: 1}}, _recursive_: true}}",
    "partial": f"{CALLBACK}{{_target_: os.system, _partial_: true}}",
    "arguments": f"{CALLBACK}{{_target_: hydra.utils.instantiate, _args_: [{{a: 1}}]}}",
    "conversion": f"{CALLBACK}{{_target_: logging.handlers.SysLogHandler, _convert_: all}}",
    "target below a callback": (
        "+hydra.callbacks={x: {_target_: hydra.experimental.callbacks.LogJobReturnCallback,"
        " a: {_target_: hydra.experimental.callbacks.LogJobReturnCallback}}}"
    ),
    "no callback, but Hydra's": "+hydra.callbacks.x._target_=hydra.experimental.callbacks.Path",
    "target below the launcher": "+hydra.launcher.inner._target_=hydra.utils.call",
    "a class outside of logging": "+hydra.sweep.x={class: logging.FileHandler, filename: v}",
    "target elsewhere": "+hydra.sweep.x={_target_: hydra.utils.call}",
    "a sweeper as launcher": (
        "hydra.launcher._target_=hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    ),
    "launcher in another module": "hydra.launcher._target_=hydra.core.plugins.Plugins",
    "walk from a launcher": (
        "hydra.launcher._target_=hydra._internal.core_plugins.basic_launcher.log.root.info"
    ),
}
WRITES = {
    "handler by walking": f"{HANDLERS}{{a: {{class: logging.os.system, command: ls}}}}",
    "handler that sends": f"{HANDLERS}{{a: {{class: logging.handlers.SocketHandler}}}}",
    "handler that calls a queue": (
        f"{HANDLERS}{{a: {{class: logging.StreamHandler, queue: os.abort}}}}"
    ),
    "object by cfg": f"{HANDLERS}{{a: {{class: logging.StreamHandler, stream: 'cfg://a.b'}}}}",
    "format that reads attributes": (
        "+hydra.job_logging.formatters={a: {class: logging.Formatter, style: '{'}}"
    ),
    "text of an override": "+hydra.callbacks.x='${hydra.job.override_dirname}'",
    "settings as callbacks": "hydra.callbacks='${method}'",
    "a dollar and the rest": "+hydra.callbacks.x.a='$${hydra.job.name}'",
    "output beside the run folder": "hydra.output_subdir=../../elsewhere",
    "output in a fixed place": "hydra.output_subdir=/tmp/elsewhere",
    "an honest handler": f"{HANDLERS}{{a: {{class: logging.FileHandler, filename: v}}}}",
    "an honest callback": (
        f"{CALLBACK}{{_target_: hydra.experimental.callbacks.LogJobReturnCallback}}"
    ),
    "another logging": "hydra/job_logging=default",
    "name that is a path": "hydra.job.name=../x",
    "environment in a file": "+hydra.job.env_copy=[HOME]",
    "search path in a dictionary": "hydra={searchpath: [/tmp]}",
    "a defaults list": "+method.defaults=[/hydra/launcher: x]",
}


class AllOnce(Bases):
    """Sets Hydra's own settings in a copy too, but for those that composing reads."""

    def _is_value(self, override: Override) -> bool:
        key = override.key_or_group
        own = override.is_hydra_override() and "/" not in key and not key.startswith("hydra.job.")
        return own or super()._is_value(override)


def not_refused(lines: Iterable[str], check: Callable[[str], object]) -> list[str]:
    found = []
    for line in lines:
        with suppress(ConfigError):
            check(line)
            found.append(line)
    return found


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("lines", [CALLS, WRITES], ids=["calls", "writes"])
def test_an_override_calls_and_writes_nothing(
    lines: dict[str, str], half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bases = AllOnce(composition._hydra_config)
    some = [*lines.values()][half::2]
    assert not not_refused(some, lambda line: compose([line], bases=bases))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [False, True])
def test_hydra_calls_and_writes_nothing(
    sweep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, composed by Hydra each time."""
    monkeypatch.chdir(tmp_path)
    lines = [*CALLS.values(), *WRITES.values()]
    assert not not_refused(lines, lambda line: check_overrides([line], sweep=sweep))
    assert not list(tmp_path.iterdir())


# (what is tried, the text of an experiment; {method} stands for the place of more settings)
FILES = {
    "a log that is truncated": (
        "hydra: {job_logging: {handlers: {a: {class: logging.FileHandler, filename: /etc/x}}}}"
    ),
    "a log above the run folder": (
        "hydra: {job_logging: {handlers: {a: {class: logging.FileHandler,"
        " filename: '${hydra.runtime.output_dir}/../x'}}}}"
    ),
    "a log by an attribute": (
        "hydra: {job_logging: {handlers: {a: {class: logging.FileHandler, delay: true,"
        " filename: '${hydra.runtime.output_dir}/x', '.': {baseFilename: /etc/x}}}}}"
    ),
    "handlers that stand elsewhere": (
        "hydra: {job_logging: {handlers: '${method.h}'}}\n"
        "method: {h: {a: {class: logging.os.system, command: ls}}}"
    ),
    "callbacks that stand elsewhere": (
        "hydra: {callbacks: '${method.h}'}\n"
        "method: {h: {a: {_target_: fedhet.methods.fedavg.FedAvg}}}"
    ),
    "a chain of references": (
        "hydra: {callbacks: '${hydra.help}', help: '${method.h}'}\n"
        "method: {h: {a: {_target_: fedhet.methods.fedavg.FedAvg}}}"
    ),
    "an interpolation in two pieces": (
        "hydra: {callbacks: {a: '${method.h}{oc.create:1}'}}\nmethod: {h: $}"
    ),
    "settings in two pieces": "method: {h: $, x: '${method.h}{oc.env:HOME}'}",
    "escaped settings": r"method: {x: '\${oc.env:HOME}'}",
}


SIMILAR = (
    "a log above the run folder",
    "a log by an attribute",
    "callbacks that stand elsewhere",
    "a chain of references",
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=name, marks=[pytest.mark.slow] * (name in SIMILAR))
        for name, text in FILES.items()
    ],
)
def test_a_file_calls_and_writes_nothing(own_conf: Path, text: str) -> None:
    (own_conf / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError, match=r"(hydra|method)\.[\w.]+=|ValidationError"):
        compose(["experiment=evil"])


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(
    "line",
    [
        "hydra.run.dir='out/${now:%Y}/${client.lr}-${seed}-${oc.env:HOME,x}'",
        "hydra.sweep.subdir='${hydra.job.override_dirname}'",
        "hydra.sweep.dir=out/${client.lr}",
        "hydra/launcher=processes",
    ],
)
def test_what_hydra_is_used_for_still_works(line: str) -> None:
    check_overrides([line])


# ---- fedhet's own `_target_`
@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(
    "target",
    [
        "fedhet.data.storage.append_line",
        "fedhet.runs.config.components.extend_search_path",
        "fedhet.runs.stores.DiskStore",
        "fedhet.methods.fedavg.FedAvg.client",
        "fedhet.methods.fedavg.Method",
        "fedhet.runs.config.instantiation.importlib.import_module",
        "fedhet..methods.fedavg.FedAvg",
        "fedhet.methods.fedavg.FedAvg ",
        "fedhet.methods.fedavg.__doc__",
    ],
)
def test_a_setting_reaches_only_the_classes_that_files_name(target: str) -> None:
    with pytest.raises(ConfigError, match=f"server_opt._target_={target}: .*class"):
        find("server_opt._target_", target)
    with pytest.raises(ConfigError):
        compose([f"server_opt._target_='{target}'"])


@pytest.mark.usefixtures("read_once")
def test_a_function_of_fedhet_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server_opt._target_=.*append_line: .*class"):
        compose(
            [
                "server_opt._target_=fedhet.data.storage.append_line",
                f"server_opt.path={tmp_path}/x",
                "server_opt.line=evil",
            ]
        )
    assert not list(tmp_path.iterdir())


def test_every_class_that_a_file_names_is_found() -> None:
    assert len(catalogue.targets()) > 60
    for target in catalogue.targets():
        assert callable(instantiation.find("x", target))
