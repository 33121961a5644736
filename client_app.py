"""Flower's ClientApp: answers the server's messages (fedhet/flower/apps.py)."""

from fedhet.runs import process

with process.imports():
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from fedhet.flower import apps
    from fedhet.runs.stores import store_at_site

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(msg: Message, context: Context) -> Message:
    """Return the reply to a message of a step, or to the server's question who the node is."""
    return apps.answer(msg, context, lambda: apps.client_for(msg, context, store_at_site))


@app.evaluate()  # type: ignore[untyped-decorator]
def evaluate(msg: Message, context: Context) -> Message:
    """Return the reply to a message of an evaluation."""
    return train(msg, context)
