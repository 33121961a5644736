"""What a client remembers from one participation to the next.

A client's state is one flat tree of tensors named "<method or plug-in>.<name>/<tensor>". A store
keeps the states by client and version. The version is the round in which the server accepted the
state, and the server names the version in every message. Therefore an update that the server leaves
out does not advance the state, and a client notices if its state is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from fedhet.core.errors import LostState
from fedhet.core.trees import Tree, as_tree, nbytes

UNSHARED = "client.kept"  # tensors that the client trains, keeps and never shares


def state_sizes(nbytes_of: Mapping[int, int]) -> dict[str, int]:
    """Return how many clients have a state, the bytes of all states, and of the largest one."""
    return {
        "clients": len(nbytes_of),
        "bytes": sum(nbytes_of.values()),
        "largest": max(nbytes_of.values(), default=0),
    }


class Store(Protocol):
    """Keeps the states of clients."""

    def load(self, pid: int, version: int) -> Tree | None:
        """Return this version of the client's state, or None if there is none."""

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        """Save the state as `version`.

        The store also retains the versions `keep`, and may delete the client's other versions.
        """


class ClientState:
    """One client's state during one message.

    It can be read and changed. Changes are committed only after the work has succeeded.

    Args:
        store: the store that keeps the state.
        pid: the client.
        version: the version to read, 0 if the client has no state yet.
        device: the device on which `get` returns tensors; None: the store's device.
        pinned: older versions that the store must retain as well.
    """

    def __init__(
        self,
        store: Store,
        pid: int,
        version: int,
        device: torch.device | None = None,
        pinned: Collection[int] = (),
    ) -> None:
        self.pid = pid
        self.version = version
        self.device = device
        self._pinned = pinned
        self.store = store
        self._changed = False

    @cached_property
    def _tensors(self) -> Tree:
        if not self.version:
            return {}
        stored = self.store.load(self.pid, self.version)
        if stored is None:
            raise LostState(
                f"client {self.pid}: its state of round {self.version} is missing on this machine;"
                " run the client on the same machine as before, with the same state folder"
            )
        return {name: t.to(self.device) for name, t in stored.items()}

    def get(self, key: str) -> Tree | None:
        """Return the tree stored as "<method or plug-in>.<name>", or None if there is none yet.

        The tensors are copies: only `put` changes the state.

        Raises:
            LostState: the version that the server named is missing from the store, or damaged.
        """
        prefix = f"{key}/"
        tree = {
            name.removeprefix(prefix): t.clone()
            for name, t in self._tensors.items()
            if name.startswith(prefix)
        }
        return tree or None

    def names(self, prefix: str) -> list[str]:
        """Return the names of the trees that begin with the prefix, without the prefix."""
        trees = dict.fromkeys(name.partition("/")[0] for name in self._tensors)
        return [name.removeprefix(prefix) for name in trees if name.startswith(prefix)]

    def put(self, key: str, tree: Tree) -> None:
        """Replace the tree stored as "<method or plug-in>.<name>"."""
        prefix = f"{key}/"
        others = {name: t for name, t in self._tensors.items() if not name.startswith(prefix)}
        self._tensors = others | {f"{prefix}{name}": t.detach() for name, t in tree.items()}
        self._changed = True

    def nbytes(self, without: Collection[str] = ()) -> int:
        """Return the size of the state in bytes, except what these methods and plug-ins keep."""
        left_out = tuple(f"{owner}." for owner in without)
        return nbytes({n: t for n, t in self._tensors.items() if not n.startswith(left_out)})

    def commit(self, version: int) -> bool:
        """Save the state as `version` if it has changed, and return whether it has."""
        if self._changed:
            keep = {self.version, *self._pinned}
            self.store.save(self.pid, version, self._tensors, keep)
        return self._changed


class StateView(Mapping[str, Any]):
    """The part of a client's state that belongs to one owner, read from the store on access.

    Args:
        state: the client's state.
        owner: the method or plug-in.
    """

    def __init__(self, state: ClientState, owner: str) -> None:
        self._state = state
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        tree = self._state.get(f"{self._owner}.{name}")
        if tree is None:
            raise KeyError(name)
        return tree[""] if list(tree) == [""] else tree

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.names(f"{self._owner}."))

    def __len__(self) -> int:
        return len(self._state.names(f"{self._owner}."))

    def keep(self, after: Mapping[str, Any]) -> None:
        """Store the entries of the new state that a function returned; the others stay."""
        if after is self:
            return
        for name, value in after.items():
            self._state.put(f"{self._owner}.{name}", as_tree(value))
