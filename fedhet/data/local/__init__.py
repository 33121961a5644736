"""Every site's own data (dataset=local): the run's declaration, and reading the sites' files.

`Declaration` is the Hydra target of conf/dataset/local.yaml, and `Sites` is the target of
conf/partition/sites.yaml. A site's files are read only at the site, or on the machine that
simulates the site.
"""

from fedhet.data.local.declaration import Declaration, Sites

__all__ = ["Declaration", "Sites"]
