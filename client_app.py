"""Flower's ClientApp of a run: the same overrides string -> the client that serves one message
(fedhet/flower/apps.py)."""

from fedhet import process

with process.imports():
    from flwr.client import Client, ClientApp
    from flwr.common import Context

    from fedhet.flower.apps import client_for
    from fedhet.state import DiskStore, state_folder


def client_fn(context: Context) -> Client:
    return client_for(context, DiskStore(state_folder(context.run_id)))


app = ClientApp(client_fn=client_fn)
