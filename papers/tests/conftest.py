"""The tests of the papers have the plug-ins of fedhet's, which lie in tests/."""

pytest_plugins = ["costs", "common"]
