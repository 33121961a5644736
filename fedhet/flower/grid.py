"""The nodes of a run by Flower's public Grid, and the messages between them and the server.

A message has the records of Flower's classic one, so that a node serves it by the same client, and
two more: the run's settings, and what the owner of the app gives to their own training loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import Code, GetPropertiesRes, Status
from flwr.serverapp import Grid

from fedhet.core.errors import RunFailed, clean
from fedhet.flower.parcels import PROPERTIES

SETTINGS = "fedhet.settings"  # the record with the run's settings, under LINES
LINES = "overrides"
CONFIG = "config"  # Flower's name of the record that the owner gives to `start` as train_config
ASKS = "fedhet.asks"  # the record of the question who a node is


def settings_records(
    lines: tuple[str, ...], config: Mapping[str, Any] | None = None
) -> dict[str, ConfigRecord]:
    """The records that each message of a run has besides Flower's.

    Args:
        lines: the settings; none where the run config has them.
        config: what the owner gives to their own training loop.
    """
    told = {SETTINGS: ConfigRecord({LINES: list(lines)})} if lines else {}
    return {**told, CONFIG: ConfigRecord(dict(config))} if config else told


@dataclass(frozen=True)
class GridNode:
    """A node, by its id in Flower's Grid.

    Attributes:
        node_id: the id.
        grid: reaches it.
        records: are part of each message to it.
    """

    node_id: int
    grid: Grid
    records: Mapping[str, ConfigRecord]

    @property
    def cid(self) -> str:
        """The id as Flower's classic server has it."""
        return str(self.node_id)

    def get_properties(self, ins: Any, timeout: float, group_id: int) -> GetPropertiesRes:
        """Ask the node who it is, by the function that every app of a method has: `train`.

        Raises:
            RunFailed: it does not answer, or reports an error.
        """
        content = RecordDict({ASKS: ConfigRecord(), **self.records})
        message = Message(content, self.node_id, MessageType.TRAIN, ttl=timeout)
        for reply in self.grid.send_and_receive([message], timeout=timeout):
            if reply.has_error():
                raise RunFailed(clean(reply.error.reason))
            told = reply.content.config_records[PROPERTIES]
            return GetPropertiesRes(Status(Code.OK, ""), dict(told))  # type: ignore[arg-type]
        raise RunFailed(f"no answer within {timeout:g} s")


@dataclass
class GridMembers:
    """The nodes that are connected, as a Grid tells them.

    Attributes:
        grid: the Grid.
        records: are part of each message to a node.
    """

    grid: Grid
    records: Mapping[str, ConfigRecord]
    _nodes: dict[str, GridNode] = field(default_factory=dict)

    def num_available(self) -> int:
        """Ask who is connected; the number of nodes."""
        present = [GridNode(one, self.grid, self.records) for one in self.grid.get_node_ids()]
        self._nodes = {node.cid: self._nodes.get(node.cid, node) for node in present}
        return len(self._nodes)

    def all(self) -> dict[str, Any]:
        """The nodes that are connected, by id."""
        self.num_available()
        return self._nodes
