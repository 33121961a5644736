"""Flower's ClientApp: composes the run's overrides and serves a message (fedhet/flower/apps.py)."""

from fedhet import process

with process.imports():
    from flwr.client import Client, ClientApp
    from flwr.common import Context

    from fedhet.flower.apps import client_for
    from fedhet.state import DiskStore, state_folder


def client_fn(context: Context) -> Client:
    """Return the client that serves the message that Flower is about to deliver."""
    return client_for(context, DiskStore(state_folder(context.run_id)))


app = ClientApp(client_fn=client_fn)
