"""What a method and its client leave to Flower's side, which fedhet/flower attaches to them."""

from __future__ import annotations

from typing import Any, Protocol


class ServerAdapter(Protocol):
    """Answers the six methods of Flower's `Strategy`, with Flower's own types."""

    def initialize_parameters(self, client_manager: Any) -> Any: ...

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any: ...

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any: ...

    def configure_evaluate(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> Any: ...

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any: ...

    def evaluate(self, server_round: int, parameters: Any) -> Any: ...


class ClientAdapter(Protocol):
    """Answers the methods of Flower's `NumPyClient`, with arrays and a config dictionary."""

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]: ...

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any: ...

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any: ...
