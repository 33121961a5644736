"""The user's own data: arrays in an npz file, or tables in csv or Parquet files.

The loaders `fedhet.data.tables.npz` and `fedhet.data.tables.table` are Hydra targets
(conf/dataset). Messages count rows from 0, without the header.
"""

from fedhet.data.tables.data_frames import table
from fedhet.data.tables.npz_file import npz

__all__ = ["npz", "table"]
