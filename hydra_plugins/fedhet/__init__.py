"""fedhet's plug-ins of Hydra, which looks for them in the namespace package hydra_plugins only."""
