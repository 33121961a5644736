"""Client drift: how far apart the clients' models are. The plug-in measures, and changes nothing.

After each round of training, for the K models w_k that clients have sent and the merged model w,
before a server optimiser's step:

    similarity_k    = <w_k, w> / (|w_k| |w|)
    distance_k      = |w_k - w|
    change_variance = var_k(w_k - w_old)                 as a mean over the parameters
    dispersion      = sqrt(mean_k |w_k - m|^2) / |m|     where m = mean_k w_k

They are over the trained parameters that clients share. A client's drift away from the others is
what SCAFFOLD corrects (Karimireddy et al. 2020). Figure 1b of FedNorm shows the similarity, figure
1 of FedSA the dispersion, and section IV of FedLEx speaks of the variance of the changes.

    train    down: nothing                   up: nothing

    client keeps: nothing
    server keeps: the models of one round, until they are merged

`dispersion` and `change_variance` go to rounds.jsonl; `pids`, `similarity` and `distance`, one
entry per client, to arrays/. With `sample=n`, so do n of the parameters, the same in each round and
for each method: `clients`, of shape (K, n), as the clients sent them, and `merged`, of shape (n,).
FedSGD's clients send gradients, no models, and FedPCL's send no parameters: both refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.core import streams
from fedhet.core.check import setting
from fedhet.core.kernel import Merged, Plugin, State, Step, Update
from fedhet.core.messages import Recorded
from fedhet.core.trees import AnyTree, Tree


@dataclass(frozen=True, kw_only=True)
class DriftPlugin(Plugin):
    """The measures above, after each step of the training.

    Args:
        sample: the number of parameters to record of each client, >= 0; at most all of them.
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
        center = torch.zeros_like(w)
        for model in models:
            center += model.double() / len(models)
        similarity, distance, scatter = [], [], 0.0
        for model in map(Tensor.double, models):
            similarity.append(torch.nn.functional.cosine_similarity(model, w, dim=0))
            distance.append((model - w).norm())
            scatter += float((model - center).square().sum()) / len(models)
        recorded: Recorded = {
            "pids": torch.tensor([update.pid for update in updates]),
            "similarity": torch.stack(similarity),
            "distance": torch.stack(distance),
            # The variance of the changes is that of the models: all change from the same one.
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
    """The tensors of `tree` that `like` has, as one vector in its order."""
    return torch.cat([tree[name].flatten() for name in like])
