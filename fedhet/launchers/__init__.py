"""Where the runs of a sweep or an experiment are carried out, and how they are watched.

The classes that Hydra sees are in hydra_plugins/fedhet.
"""
