"""Client drift: how far apart the clients' models are. The plug-in measures, and changes nothing.

After each round of training, the server compares the K models w_k that clients have sent with the
merged model w, as it is before the step of a server optimiser:

    similarity_k    = <w_k, w> / (|w_k| |w|)
    distance_k      = |w_k - w|
    change_variance = var_k(w_k - w_old)                 as a mean over the parameters
    dispersion      = sqrt(mean_k |w_k - m|^2) / |m|     with m = mean_k w_k

These measures cover the trained parameters that clients share. SCAFFOLD corrects the drift of a
client away from the other clients (Karimireddy et al. 2020). Figure 1b of FedNorm shows the
similarity, figure 1 of FedSA shows the dispersion, and section IV of FedLEx discusses the variance
of the changes.

    train    down: nothing                   up: nothing

    client keeps: nothing
    server keeps: the models of one round, until they are merged

The run writes `dispersion` and `change_variance` to rounds.jsonl. It writes `pids`, `similarity`
and `distance`, with one entry per client, to arrays/. With `sample=n` it also writes n of the
parameters to arrays/, the same parameters in each round and for each method: `clients`, of shape
(K, n), as the clients sent them, and `merged`, of shape (n,).

FedSGD refuses this plug-in because its clients send gradients and no models. FedPCL refuses it
because its clients send no parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.core import streams
from fedhet.core.authors import (
    AnyTree,
    Merged,
    Plugin,
    Recorded,
    State,
    Step,
    Tree,
    Update,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class DriftPlugin(Plugin):
    """Records the measures above after each step of the training.

    Args:
        sample: the number of parameters of each client's model to record, >= 0. If it exceeds the
            number of parameters, all are recorded.
    """

    name = "drift"
    needs = frozenset({"model", "weights"})
    needs_all = True

    sample: int = setting(0, low=0)

    def after(
        self, step: Step, state: State, old: Tree, new: Tree, updates: Sequence[Update]
    ) -> Merged:
        if not updates:
            return Merged(new, state)
        models = [_flat(update.weights, update.change) for update in updates]
        w = _flat(new, new).double()
        center = sum((model.double() / len(models) for model in models), torch.zeros_like(w))
        similarity, distance, scatter = [], [], 0.0
        for model in map(Tensor.double, models):
            similarity.append(torch.nn.functional.cosine_similarity(model, w, dim=0))
            distance.append((model - w).norm())
            scatter += float((model - center).square().sum()) / len(models)
        recorded: Recorded = {
            "pids": torch.tensor([update.pid for update in updates]),
            "similarity": torch.stack(similarity),
            "distance": torch.stack(distance),
            # All models start from the same one, so their changes vary as the models do.
            "change_variance": scatter / len(w),
            "dispersion": scatter**0.5 / float(center.norm()),
        }
        if self.sample:
            draw = streams.torch_generator(step.workspace.seed, "drift")
            entries = torch.randperm(len(w), generator=draw)[: self.sample].to(w.device)
            recorded["clients"] = torch.stack([model[entries] for model in models])
            recorded["merged"] = w[entries].float()
        return Merged(new, state, recorded)


def _flat(tree: AnyTree, like: AnyTree) -> Tensor:
    """Return the tensors of `tree` that `like` names, as one vector in the order of `like`."""
    return torch.cat([tree[name].flatten() for name in like])
