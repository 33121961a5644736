"""The Heart Disease data of four hospitals (Janosi et al. 1988), a natural federation.

README.md in this folder names the authors, the licence (CC BY 4.0) and the columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import RawSamples, assemble
from fedhet.data.dataset import Dataset
from fedhet.data.encoding import Cells
from fedhet.data.tables import Columns

if TYPE_CHECKING:
    import pandas

FILE = Path(__file__).with_name("hospitals.json")
CLASSES = ("healthy", "diseased")


def hospitals() -> dict[str, pandas.DataFrame]:
    """Return each hospital's patients, with the original files' columns; missing values are NaN.

    The label `disease` is "healthy" if the original `num` is 0, else "diseased".
    """
    import pandas

    content = json.loads(FILE.read_text())
    columns = content.pop("columns")
    tables = {name: pandas.DataFrame(rows, columns=columns) for name, rows in content.items()}
    for table in tables.values():
        table["disease"] = np.where(table.pop("num") > 0, *reversed(CLASSES))
    return tables


def heart_disease(
    *,
    name: str,
    data_dir: str = "",
    features: Sequence[str],
    categories: Mapping[str, Sequence[Any]] | None,
    missing: str,
    **statistics: Any,
) -> Dataset:
    """Load the Heart Disease data: whether a patient has a heart disease.

    A patient's owner is the hospital. `data_dir` is not used. The global test set is the one of
    FLamby (Ogier du Terrail et al. 2022, fed_heart_disease): 34 % of each hospital's patients,
    independent of the run's seed. It is stratified in hospitals with more than two patients of each
    class.

    Args:
        features: columns of the original files.
        categories, missing: see `fedhet.data.encoding.Cells`.
        statistics: mean and std, see `fedhet.data.dataset.Dataset`.
    """
    cells = Cells(categories, missing)
    columns = Columns("disease", "class", CLASSES, features, owner="hospital", cells=cells)

    def read() -> Arrays:
        import pandas

        tables = [table.assign(hospital=name) for name, table in hospitals().items()]
        frame = pandas.concat(tables, ignore_index=True)
        described, (samples,) = columns.read([(FILE.name, frame)])
        test = np.isin(np.arange(len(samples.x)), held_out(samples))
        return columns.encoded([samples.rows(~test), samples.rows(test)]) | described

    key = {
        "loader": "heart_disease",
        "version": version("scikit-learn"),
        **columns.key,
        "files": signature([FILE]),
    }
    return assemble(name, key, read, missing=missing, detailed=True, **statistics)


def held_out(samples: RawSamples) -> list[int]:
    """Return the indices of the samples in FLamby's test set."""
    from sklearn.model_selection import train_test_split

    assert samples.owners is not None
    found: list[int] = []
    for hospital in dict.fromkeys(samples.owners):
        rows = np.flatnonzero(samples.owners == hospital)
        labels = samples.y[rows]
        _, counts = np.unique(labels, return_counts=True)
        stratify = labels if len(counts) > 1 and min(counts) > 2 else None
        sizes = {"train_size": 0.66, "test_size": 1.0 - 0.66}
        _, test = train_test_split(rows, **sizes, random_state=43, stratify=stratify)
        found += test.tolist()
    return found
