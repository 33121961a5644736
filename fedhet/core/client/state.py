"""What a client remembers from one participation to the next.

A client's state is one flat tree of "<method or plug-in>.<name>/<tensor>". A store keeps it by
client and by version: the version is the round in which the server accepted the state, and the
server names it in every message. Thus an update that was left out does not advance the state, and
the loss of a state is detected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch

from fedhet.core.errors import LostState
from fedhet.core.trees import Tree, nbytes

UNSHARED = "client.kept"  # what a client keeps: tensors that are trained here and never shared


def state_sizes(nbytes_of: Mapping[int, int]) -> dict[str, int]:
    """What clients remember between rounds: how many do, the bytes of all, the largest."""
    return {
        "clients": len(nbytes_of),
        "bytes": sum(nbytes_of.values()),
        "largest": max(nbytes_of.values(), default=0),
    }


class Store(Protocol):
    """Where states are kept."""

    def load(self, pid: int, version: int) -> Tree | None:
        """Return this version of the client's state, or None if there is none."""

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        """Save the state as `version`.

        The store also retains the versions `keep`, and may delete the client's other versions.
        """


class ClientState:
    """One client's state during one message.

    It can be read and changed; the changes are committed only when the work has succeeded.

    Args:
        store: where the state is kept.
        pid: the client.
        version: the version to read, 0 if the client has no state yet.
        device: the device on which `get` returns tensors; None for where the store has them.
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
        self._state: Tree | None = None
        self._changed = False

    def _load(self) -> Tree:
        if self._state is None:
            self._state = {}
            if self.version:
                stored = self.store.load(self.pid, self.version)
                if stored is None:
                    raise LostState(
                        f"client {self.pid}: its state of round {self.version} is missing on this"
                        " machine; the client must run where it ran before, with the same state"
                        " folder"
                    )
                self._state = {name: t.to(self.device) for name, t in stored.items()}
        return self._state

    def get(self, key: str) -> Tree | None:
        """Return the tree stored as "<method or plug-in>.<name>", or None if there is none yet.

        The tensors are copies: only `put` changes the state.

        Raises:
            LostState: the version that the server names is missing from the store, or damaged.
        """
        prefix = f"{key}/"
        tree = {
            name.removeprefix(prefix): t.clone()
            for name, t in self._load().items()
            if name.startswith(prefix)
        }
        return tree or None

    def keys(self, owner: str) -> list[str]:
        """Return the names of what is stored as "<owner>.<name>"."""
        of_owner = [name for name in self._load() if name.startswith(f"{owner}.")]
        names = (name.partition("/")[0].removeprefix(f"{owner}.") for name in of_owner)
        return list(dict.fromkeys(names))

    def put(self, key: str, tree: Tree) -> None:
        """Replace the tree stored as "<method or plug-in>.<name>"."""
        prefix = f"{key}/"
        others = {name: t for name, t in self._load().items() if not name.startswith(prefix)}
        self._state = others | {f"{prefix}{name}": t.detach() for name, t in tree.items()}
        self._changed = True

    def nbytes(self, without: Collection[str] = ()) -> int:
        """The size of the state in bytes, without what these methods and plug-ins keep."""
        left_out = tuple(f"{owner}." for owner in without)
        return nbytes({n: t for n, t in self._load().items() if not n.startswith(left_out)})

    def commit(self, version: int) -> bool:
        """Save the state as `version` if it has changed, and return whether it has."""
        if self._changed:
            keep = {self.version, *self._pinned}
            self.store.save(self.pid, version, self._load(), keep)
        return self._changed


class StateView(Mapping[str, Any]):
    """What a client keeps for one owner, as far as it is read.

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
        return iter(self._state.keys(self._owner))

    def __len__(self) -> int:
        return len(self._state.keys(self._owner))

    def keep(self, after: Mapping[str, Any]) -> None:
        """Put what a function returns as the new state in the place of this one."""
        if after is self:
            return
        for name, value in after.items():
            tree = {"": value} if isinstance(value, torch.Tensor) else value
            self._state.put(f"{self._owner}.{name}", tree)
