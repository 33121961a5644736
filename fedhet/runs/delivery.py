"""The final models at the sites of a run (`deliver=true`).

After the training, the server repeats its last evaluation message with the digest of the final
global model. Each node writes this model and its client's personal model to a folder that its
operator has chosen; no run names a path:

    <run_id>/<client>/model.safetensors     the global model, if the method has one
    <run_id>/<client>/personal.safetensors  the client's personal model; it never leaves the site
    <run_id>/<client>/summary.json          a description of the models, and their scores

The folder also has config.yaml, partition.json and environment.json, so that `python -m fedhet
predict` and `export` accept it like a run folder.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from torch import nn

from fedhet.core import trees
from fedhet.core.client.client import DELIVER, FedClient, evaluated_views
from fedhet.core.errors import ConfigError, Rejected, log
from fedhet.core.kernel import Client
from fedhet.core.messages import Failure, Upload
from fedhet.core.server.callbacks import Callback
from fedhet.core.server.evaluation import evaluation_messages, evaluation_moment
from fedhet.data.storage import (
    fitting,
    read_tensors,
    save_tensors,
    write_json,
    write_text,
    written_folder,
)
from fedhet.runs.record.summary import versions
from fedhet.runs.stores import own_folder

if TYPE_CHECKING:
    from fedhet.core.server.loop import Loop
    from fedhet.runs.job import Job

VARIABLE = "FEDHET_MODEL_DIR"
DEFAULT = "fedhet-models"  # next to the clients' states
# The keys of partition.json at the site: inputs and outputs, not who has which samples.
DESCRIBED = [
    *("shape", "columns", "target", "classes", "numbers"),
    *("normalised", "target_scale", "vocabulary", "padding", "missing", "own"),
]


# ---- the server
class Delivery(Callback):
    """Lets every client keep the final models, and records which clients did.

    If a client is away or cannot write, the reason is recorded and logged, and the run still ends
    with success.
    """

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        if status != "ok":
            return
        method = loop.method
        has_global = "global" in method.views
        digest = trees.sha256({"model": method.weights["model"]}) if has_global else ""
        messages = evaluation_messages(method, evaluation_moment(method))
        plan = [replace(msg, extras={**msg.extras, DELIVER: digest}) for msg in messages]
        record: dict[str, Any] = {"model_sha256": digest or None, "clients": [], "failed": {}}
        for reply in loop.exchange(plan):
            if isinstance(reply, Upload) and (reply.weights or reply.extras or reply.metrics):
                cause = "its reply to a delivery has content, and must have none"
                reply = Failure(reply.pid, plan[0].phase, plan[0].step, cause, "refused")
            if isinstance(reply, Upload):
                record["clients"].append(reply.pid)
                continue
            record["failed"][str(reply.pid)] = reply.cause
            loop.failures.append({"round": plan[0].round, **vars(reply)})
            log.warning("client %d has not kept the final model: %s", reply.pid, reply.cause)
        log.info("the final model is at %d of %d clients", len(record["clients"]), len(plan))
        loop.notes["delivery"] = record


# ---- the node
def keep(job: Job, client: FedClient) -> Upload:
    """Write the models that the message describes to the site's folder; the reply only confirms it.

    Raises:
        ConfigError: the settings of the run have no `deliver=true`.
        Rejected: the model at this site differs from the server's model.
        WriteError: the files cannot be written; an earlier delivery stays unchanged.
    """
    msg, workspace = client.msg, client.workspace
    stated = msg.text(DELIVER)
    if not job.config.run.deliver:
        raise ConfigError(
            "the server delivers a model, but the settings of the run have deliver=false"
        )
    models: dict[str, trees.Tree] = {}

    def take(view: str, model: nn.Module) -> None:
        if view == "personal":
            models[view] = {name: t.clone() for name, t in model.state_dict().items()}

    scores = client.assess(take).metrics
    views = list(evaluated_views(client.views(), workspace))
    digest = None
    if "global" in views:
        trees.check_like(
            "the final model", msg.weights, trees.pick(workspace.initial, workspace.shared)
        )
        models["model"] = {**workspace.initial, **msg.weights}
        digest = trees.sha256({"model": models["model"]})
    if stated != (digest or ""):
        raise Rejected(
            "wrong content",
            f"the final model here has the digest {str(digest)[:16]}, the server's model has"
            f" {(stated or 'None')[:16]!r}",
        )
    config = job.config
    summary = {
        "status": "ok",
        "delivered": {"client": msg.pid, "round": msg.round},
        "experiment": msg.run_id,
        "plugins": list(config.plugins),
        **{key: config.choices[key] for key in ("method", "server_opt", "dataset", "model")},
        "seed": config.run.seed,
        "rounds": config.run.rounds,
        "target": job.task.scoring.name,
        "score": job.task.scoring.score() or None,
        "train_samples": client.num_examples,
        "models": views,
        "weights_sha256": digest,
        "scores": scores,
    }
    home = _root() / msg.run_id / str(msg.pid)
    with written_folder(home, replaces=True) as part:  # a resumed run may have delivered before
        for name, tree in models.items():
            save_tensors(part / f"{name}.safetensors", tree)
        write_json(part / "partition.json", {key: job.partition[key] for key in DESCRIBED})
        write_json(part / "environment.json", versions())
        write_text(part / "config.yaml", OmegaConf.to_yaml(config.cfg))
        write_json(part / "summary.json", summary)
    log.info("client %d: the final models are in %s", msg.pid, home)
    return Upload(msg.pid, client.num_examples)


def _root() -> Path:
    """Return the folder for delivered models that the operator of this site has chosen.

    Raises:
        ConfigError: its path is not absolute.
        ValueError: the default folder is open to other users.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return own_folder(DEFAULT)
    if not Path(named).is_absolute():
        raise ConfigError(f"the environment variable {VARIABLE} must be an absolute path")
    return Path(named)


# ---- reading
def load(
    folder: Path,
    summary: dict[str, Any],
    weights: str,
    client: int,
    half: type[Client],
    model: nn.Module,
) -> nn.Module:
    """Return the personal model of a client from a folder that a node has written.

    Args:
        folder: the folder.
        summary: the content of its summary.json.
        weights: "personal"; no other model of a client is delivered.
        client: the client.
        half: the client half of the method.
        model: a model like the run's model; its values are replaced.

    Raises:
        ConfigError: the folder has no such model.
        DataError: a file is damaged.
    """
    path, own = folder / f"{weights}.safetensors", summary["delivered"]["client"]
    if client != own or not path.exists():
        has = " and ".join(file.name for file in sorted(folder.glob("*.safetensors")))
        raise ConfigError(
            f"{folder} has no {weights} model of client {client}; a run delivered only {has} of"
            f" client {own}"
        )
    module = half.personal_module(model)
    values = read_tensors(path)
    with fitting(path):
        module.load_state_dict(values)
    return module
