"""FedAvg: local SGD, then the mean of the weights by number of samples (McMahan et al. 2017).

The paper is "Communication-efficient learning of deep networks from decentralized data".

    client: w <- w - lr g(w) over E epochs of mini-batches, from w = x     (algorithm 1)
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j

    down:          x
    up:            w_k, n_k
    client keeps:  nothing
    server keeps:  x

The sums run over the participants of the round. They are the defaults of FedClient and FedStrategy,
so that the classes below add nothing; examples/fedavg.py is the whole algorithm in plain torch.
FedAvgM, FedAdam, FedYogi and FedAdagrad are this method with a server optimiser
(fedhet/core/server_opt.py).

Deviations and choices: the optimiser starts afresh in each round, and the last batch of an epoch
may be smaller than the others. A reply whose weights have changed by more than 1000 times the
median of the last step, or in a phase's first step by more than 30 times its own, is refused, by
default of every method (replies.max_jump=null: none is)."""

from __future__ import annotations

from typing import Any

from fedhet.core.client import FedClient
from fedhet.core.plugin import Plugin
from fedhet.core.strategy import FedStrategy


class FedAvgClient(FedClient):
    """Trains by local SGD from the received weights."""


class FedAvg(FedStrategy):
    """Averages the clients' weights, each weighted by its number of training samples."""

    name = "fedavg"
    client_cls = FedAvgClient

    @classmethod
    def preset(cls, name: str, plugin: type[Plugin], **fixed: Any) -> type[FedAvg]:
        """FedAvg with a plug-in, as a method of its own.

            FedNorm = FedAvg.preset("FedNorm", FedNormPlugin)

        Args:
            name: the name to which it is assigned; in lower case it is the method's.
            plugin: the plug-in, in whose module that is.
            fixed: options of the plug-in that the method does not leave open.
        """
        members = {
            "name": name.lower(),
            "requires": plugin,
            "fixed": fixed,
            "__module__": plugin.__module__,
            "__doc__": f"FedAvg with the plug-in {plugin.name!r}.",
        }
        return type(name, (cls,), members)
