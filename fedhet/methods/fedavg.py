"""FedAvg: local SGD, then the mean of the weights by number of samples (McMahan et al. 2017).

The paper is "Communication-efficient learning of deep networks from decentralized data".

    client: w <- w - lr g(w) over E epochs of mini-batches, from w = x     (algorithm 1)
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j

    down:          x
    up:            w_k, n_k
    client keeps:  nothing
    server keeps:  x

The sums run over the participants of the round. They are the defaults of Method and Client
(fedhet/core/kernel.py), so that the class below adds nothing; examples/fedavg.py is the whole
algorithm in plain torch.
FedAvgM, FedAdam, FedYogi and FedAdagrad are this method with a server optimiser
(fedhet/core/server/server_opt.py).

Deviations and choices: the optimiser starts afresh in each round, and the last batch of an epoch
may be smaller than the others. A reply whose weights have changed by more than 1000 times the
median of the last step, or in a phase's first step by more than 30 times its own, is refused, by
default of every method (replies.max_jump=null: none is)."""

from __future__ import annotations

from dataclasses import dataclass

from fedhet.core.kernel import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Averages the clients' weights, each weighted by its number of training samples."""

    name = "fedavg"
