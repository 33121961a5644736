"""FedAvg: local SGD, then the mean of the weights by number of samples (McMahan et al. 2017).

The paper is "Communication-efficient learning of deep networks from decentralized data".

    client: w <- w - lr g(w) over E epochs of mini-batches, from w = x     (algorithm 1)
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j

    down:          x
    up:            w_k, n_k
    client keeps:  nothing
    server keeps:  x

The sums run over the participants of the round. Method and Client (fedhet/core/kernel.py) do this
by default, so the class below adds nothing. examples/fedavg.py is the whole algorithm in plain
torch. FedAvgM, FedAdam, FedYogi and FedAdagrad are this method with a server optimiser
(fedhet/core/server/server_opt.py).

Deviations and choices: the optimiser starts afresh in each round, and the last batch of an epoch
may be smaller than the other batches. By default, and for every method, the server refuses a reply
if it changes the weights by more than 1000 times the median change of the previous step. In the
first step of a phase the limit is 30 times the median of that step itself. replies.max_jump=null
turns both limits off."""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.core.kernel import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Averages the clients' weights, each weighted by its number of training samples."""

    name = "fedavg"
