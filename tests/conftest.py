"""All tests have these plug-ins; those of papers/tests name them, too."""

pytest_plugins = ["costs", "common"]
