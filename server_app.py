"""Flower's ServerApp of a run: the overrides string of the run config -> Hydra -> strategy and
server (fedhet/flower/apps.py)."""

from fedhet import process

with process.imports():
    from flwr.common import Context
    from flwr.server import ServerApp, ServerAppComponents

    from fedhet.flower.apps import server_for


def server_fn(context: Context) -> ServerAppComponents:
    return server_for(context)


app = ServerApp(server_fn=server_fn)
