"""What `fedhet new` writes: per kind a class, its yaml file and its test, and a pyproject.toml."""
