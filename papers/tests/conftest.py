"""The tests of the papers use the pytest plug-ins of fedhet's tests in tests/."""

pytest_plugins = ["costs", "common"]
