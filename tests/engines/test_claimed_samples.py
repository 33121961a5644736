"""The number of samples that a site claims of itself, which is its weight in every mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import composed
from own_sites import RUN, Deployment, telling, write_sites

import fedhet
from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.runs.job import Job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sites(tmp_path)


def test_a_site_with_more_samples_than_a_run_allows(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own log says so, and the server says so of one that does not."""
    said = "site 'b' has 120 samples in one of its parts, more than dataset.max_samples=100"
    assert (
        "site 'b' cannot serve this run" in Deployment(folder, "dataset.max_samples=100").refusal()
    )
    assert said in caplog.text
    for sizes in ([10**12, 10, 10], [80, 10**12, 10]):
        deployment = Deployment(folder, "dataset.max_samples=120", sites="bc")
        deployment.join("a", 1).alter = telling({"sizes": sizes})
        assert f"node 1: site 'a' has {10**12} samples" in deployment.refusal()
    assert Deployment(folder, "dataset.max_samples=120").agree()


@pytest.mark.parametrize("merge", ["krum", "norm_clip", "norm_filter"])
def test_a_merge_that_bounds_updates_needs_a_bound_on_their_weights(
    folder: Path, merge: str
) -> None:
    """A site that claims 10^12 samples takes the whole mean, however short its update is."""
    line = f"merge={merge}"
    files = f"dataset.files={{{','.join(f'{site}:{folder}/{site}.npz' for site in 'abc')}}}"
    refused = [*RUN, files, "method=fedavg", line, f"hydra.run.dir={folder / 'run'}"]
    with pytest.raises(ConfigError, match=rf"{line} .*dataset\.max_samples="):
        fedhet.run(refused)
    settings = composed(*RUN, "method=fedavg", line, "dataset.max_samples=120")
    assert Job(settings, toy_task(7)).strategy.setup.merge.name == merge


@pytest.mark.parametrize("merge", ["mean", "median", "trimmed_mean"])
def test_other_merges_need_no_bound(merge: str) -> None:
    settings = composed(*RUN, "method=fedavg", f"merge={merge}")
    assert Job(settings, toy_task(7)).strategy.setup.merge.name == merge


def test_a_site_that_outweighs_all_others_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Deployment(folder).agree()
    assert "outweighs" not in caplog.text
    deployment = Deployment(folder, sites="bc")
    moments = {"x": {"count": 10**12, "mean": [0.0] * 64, "squares": [0.0] * 64}}
    many = {"sizes": [10**12, 10, 10], "moments": moments}
    deployment.join("a", 3).alter = telling(many)
    deployment.agree()
    assert f"site a claims {10**12}" in caplog.text and "160" in caplog.text
