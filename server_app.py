"""Flower's ServerApp: composes the run's overrides and runs the server (fedhet/flower/apps.py)."""

from fedhet import process

with process.imports():
    from flwr.common import Context
    from flwr.server import ServerApp, ServerAppComponents

    from fedhet.flower.apps import server_for


def server_fn(context: Context) -> ServerAppComponents:
    """Return the strategy and the server of the run that Flower is about to start."""
    return server_for(context)


app = ServerApp(server_fn=server_fn)
