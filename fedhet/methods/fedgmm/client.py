"""FedGMM's client half: fits mixtures to the client's samples, and draws from everyone's."""

from __future__ import annotations

import logging
import math
from functools import partial

import torch
from torch import Tensor

from fedhet.core import streams
from fedhet.core.counts import suppressed
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.task import Samples
from fedhet.core.trees import kind
from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture
from fedhet.methods.fedgmm import noised
from fedhet.methods.fedgmm.mixtures import MIXTURES, checked_size, pack, unpack
from fedhet.methods.fedgmm.options import MixtureOptions

log = logging.getLogger("fedhet")

COUNTS = "fedgmm.counts"
GLOBAL_MAX = "fedgmm.global_max"
GENERATED = "fedgmm.generated"
# A class of many samples has so many times privacy.min_count behind each component: with fewer, the
# distance to a component distinguishes training samples from others (docs/privacy.md).
PER_COMPONENT = 4
KEPT = "fedgmm.samples"  # state: x (m, ...) uint8, y (m,)


class MixtureClient(MixtureOptions):
    """Serves the phases `fit` and `share`, and adds the generated samples to every training."""

    unsized = (KEPT,)

    # ---- phase "fit"
    def fit(self, msg: Broadcast) -> Update:
        """Fit one mixture to each class of which the client has enough samples, and send them.

        A class has at least `workspace.min_count` samples, and a component PER_COMPONENT times
        as many, unless it is the only one of its class: EM starts with fewer components, and those
        that are smaller in the end are merged with others.
        """
        workspace = self.client.workspace
        pid = self.client.pid
        data = self._pixels()
        d = math.prod(data.x.shape[1:])
        counts = suppressed(
            data.y.bincount(minlength=workspace.task.classes).cpu(), workspace.min_count
        )
        fewest = PER_COMPONENT * workspace.min_count
        components = {
            c: maths.components(n, self.components, fewest)
            for c, n in enumerate(counts.tolist())
            if n >= self.min_class_samples
        }
        n, k = int(counts.max()), max(components.values(), default=0)
        limits, name = workspace.limits, f"plugin.fedgmm.components={self.components}"
        limits.check_array(name, max(n, 2 * d), k, width=8)  # of samples, and of components
        if workspace.noise:
            limits.check_array(name, workspace.task.classes, self.components, d)
        checked_size("this client", sum(components.values()), d, self.max_payload_mb)
        mixtures: dict[int, Mixture] = {}
        not_converged = 0
        for c, k in components.items():
            x = data.x[data.y == c].flatten(1)
            seed = streams.integer(workspace.seed, f"fedgmm.em.{c}", msg.phase, msg.step, pid)
            mixture, converged = maths.fit(x, k, reg_covar=self.reg_covar, seed=seed)
            # A component's samples are n pi, up to rounding.
            least = fewest * (1 - 1e-6) / len(x)
            mixtures[c] = maths.reduce(mixture, k, least) if fewest else mixture
            if not converged:
                not_converged += 1
                log.warning(
                    "fedgmm: client %d, class %d: EM has not converged; the mixture of its last"
                    " step is used",
                    pid,
                    c,
                )
        sent: Extras = {COUNTS: counts, MIXTURES: pack(mixtures, d)}
        if workspace.noise:
            shares, tree = noised.content(counts, mixtures, self.components, d)
            sent = {COUNTS: shares, MIXTURES: tree}
        return Update(
            pid,
            self.client.num_examples,
            extras=sent,
            metrics={"fedgmm.not_converged": float(not_converged)},
        )

    # ---- phase "share"
    def share(self, msg: Broadcast) -> Update:
        """Draw the samples that this client lacks of each class, once for the whole run."""
        workspace = self.client.workspace
        pid = self.client.pid
        data = self._pixels()
        shape = data.x.shape[1:]
        classes = workspace.task.classes
        mixtures = unpack(msg.tree(MIXTURES), math.prod(shape), classes, self.reg_covar)
        lacking = partial(
            maths.generate_counts,
            available=torch.tensor([c in mixtures for c in range(classes)]),
            target=self.target,
            global_max=msg.integer(GLOBAL_MAX) if GLOBAL_MAX in msg.extras else 0,
        )
        counts = data.y.bincount(minlength=classes).cpu()
        missing = lacking(counts)
        total = int(missing.sum())
        workspace.limits.check_array(f"plugin.fedgmm.target={self.target}", total, math.prod(shape))
        x = torch.empty(total, math.prod(shape), dtype=torch.uint8)
        for c, part in enumerate(x.split(missing.tolist())):
            if len(part):
                draws = streams.generator(
                    workspace.seed, f"fedgmm.draw.{c}", msg.phase, msg.step, pid
                )
                part.copy_(maths.sample(mixtures[c], len(part), draws).mul_(255).round_())
        y = torch.arange(classes, dtype=data.y.dtype).repeat_interleave(missing)
        # Also where nothing is missing: the state shows that the phase has been here.
        self.client.state.put(KEPT, {"x": x.unflatten(1, shape), "y": y})
        # How many it lacks follows from its exact counts: it sends what follows from those that it
        # has sent.
        said = int(lacking(suppressed(counts, workspace.min_count)).sum())
        return Update(
            pid, self.client.num_examples, extras={} if workspace.noise else {GENERATED: said}
        )

    def released(self, update: Update) -> None:
        if COUNTS in update.extras:
            update.extras[COUNTS], update.extras[MIXTURES] = noised.accepted(
                update.tensor(COUNTS).cpu(),
                update.tree(MIXTURES),
                update.num_examples,
                self.min_class_samples,
                self.reg_covar,
            )

    # ---- training
    def data(self, raw: Samples) -> Samples:
        if not self.client.msg.trains:  # a phase of this plug-in
            return raw
        generated = self.client.state.get(KEPT)
        if generated is None:
            raise ValueError(
                "the client has no generated samples: phase 'fedgmm.share' has not reached it, or"
                " failed there"
            )
        x = generated["x"].to(raw.x.device).to(raw.x.dtype).div_(255)
        y = generated["y"].to(raw.x.device)
        return Samples(torch.cat([raw.x, x]), torch.cat([raw.y, y]))

    def sample_weights(self, data: Samples) -> Tensor | None:
        if self.gen_weight == 1:
            return None
        weights = data.x.new_full((len(data),), self.gen_weight)
        weights[: self.client.num_examples] = 1
        return weights

    def _pixels(self) -> Samples:
        """The real training samples.

        Raises:
            ValueError: the inputs are not in [0, 1], or the labels are not classes.
        """
        workspace = self.client.workspace
        pid = self.client.pid
        classes = workspace.task.classes
        data = workspace.floating(workspace.task.clients[pid].train)
        low, high = (float(bound) for bound in data.x.aminmax())
        if not (low >= 0 and high <= 1):  # also where they are NaN
            raise ValueError(f"fedgmm models pixels in [0, 1], but client {pid} has others")
        first, last = (bound.item() for bound in data.y.aminmax())
        if data.y.ndim != 1 or data.y.is_floating_point() or first < 0 or last >= classes:
            raise ValueError(
                f"fedgmm needs labels 0 to {classes - 1}; client {pid} has {kind(data.y)} with"
                " others"
            )
        return data
