"""Messages to nodes in this process, and their replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.messages import Broadcast, Reply
from fedhet.flower import wire

TASK = {"_task_id": 1, "_run_id": 1, "_node_id": 1}  # which Flower sets in its processes


def answered(
    content: RecordDict, context: Context, app: ClientApp | Callable[[Message, Context], Message]
) -> Message:
    """The reply of an app, or of its function, to a message with this content."""
    with patch.multiple(TaskIdentity, **TASK):
        message = Message(content, 1, MessageType.TRAIN)
        message.metadata.__dict__["_message_id"] = "asked"
        return app(message, context)


def packed_message(msg: Broadcast) -> tuple[list[np.ndarray], dict[str, Any]]:
    """What `NumPyClient.fit` is given."""
    tensors, config = wire.MessagePacker()(msg)
    return list(map(wire.read_array, tensors)), config


def packed_weights(msg: Broadcast, reply: Reply) -> tuple[list[str], list[str]]:
    """The names of the weights in a packed message and in the packed reply."""
    arrays, _, metrics = wire.reply_arrays(msg, reply)
    sent, *_ = wire.unpack(*packed_message(msg))
    back, *_ = wire.unpack(arrays, metrics)
    return list(sent), list(back)
