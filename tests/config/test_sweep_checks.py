"""The check of a sweep, which comes before its first job."""

from __future__ import annotations

import pytest
from composing import check_overrides

from fedhet.core.errors import ConfigError
from fedhet.runs.config.overrides import parse, product

pytestmark = pytest.mark.usefixtures("read_once")


@pytest.mark.parametrize(
    "sweep",
    [
        ["method='fedavg','fednorm'", "plugin=[fedprox],[fedprox,fednorm]", "seed=0,1"],
        ["method=choice(fedavg,scaffold)", "client.lr=.1,.2"],
        ["method=glob(fedad*)"],
        ["seed=range(0,1000)", "client.lr=.1,1", "plugin=fednorm,fedprox"],
        ["method=fednorm,scaffold", "plugin=[fednorm]", "plugin.fednorm.temperature=.1,1"],
    ],
)
def test_correct_sweeps(sweep: list[str]) -> None:
    assert check_overrides(sweep, sweep=True) == product(parse(sweep))


@pytest.mark.parametrize(
    ("sweep", "parts"),
    [
        (["method=fedavg,fednormm"], ["method 'fednormm'", "did you mean fednorm"]),
        (["method=choice(fedavg,fednormm)"], ["method 'fednormm'"]),
        (
            ["plugin=[fednorm],[fednorm,fedprx]"],
            ["plugin 'fedprx'", "did you mean fedprox"],
        ),
        (["method=range(0,3)"], ["method '0'"]),
        (["method=glob(zzz*)"], ["'method=glob(zzz*)'", "value"]),
        (["method=fedavg,fednorm", "client.lrr=1,2"], ["client.lrr", "did you mean client.lr"]),
        (
            ["method=fednorm,fedavg", "plugin.fednorm.temperature=.1"],
            ["plugin=[fednorm]", "sweep's run method=fedavg"],
        ),
        (["client.lr=.1,-1"], ["client.lr=-1 "]),
        (["seed=range(-1,3)"], ["seed=-1 "]),
        (["seed=range(3,0,-1)", "rounds=range(5,-1,-1)"], ["rounds=0 "]),
        (["client.lr=interval(0,1)"], ["'client.lr=interval(0,1)'", "values"]),
        (
            ["method=fedadam,fedavg", "server_opt=none,fedadam"],
            ["method=fedadam ", "server_opt=fedadam"],
        ),
        (["seed=0,1", "newkey=1"], ["setting 'newkey'"]),
    ],
)
def test_sweeps_are_refused_before_their_first_job(sweep: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_overrides(sweep, sweep=True)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
