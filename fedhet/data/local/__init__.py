"""Every site's own data (dataset=local): a declaration, and what each site has of it.

`Declaration` is the Hydra target of conf/dataset/local.yaml, `Sites` that of
conf/partition/sites.yaml. Nothing here reads a site's file anywhere but at that site, or, in a
simulation, on the machine that simulates it.
"""

from fedhet.data.local.declaration import Declaration, Sites

__all__ = ["Declaration", "Sites"]
