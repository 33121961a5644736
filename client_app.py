"""Flower's ClientApp: composes the run's overrides and serves a message (fedhet/flower/apps.py)."""

from fedhet import process

with process.imports():
    from flwr.client import Client, ClientApp
    from flwr.common import Context

    from fedhet.flower import apps, parcels
    from fedhet.stores import store_at_site


def client_fn(context: Context) -> Client:
    """Return the client that serves the message that Flower is about to deliver."""
    return apps.client_for(context, store_at_site)


app = ClientApp(client_fn=client_fn, mods=[apps.tell, parcels.open_parcel])
