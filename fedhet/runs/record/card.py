"""The model card: one Markdown page with all that a user of the model should know."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedhet.core.errors import clean, log
from fedhet.core.kinds import KINDS
from fedhet.data.forms import read_object
from fedhet.data.storage import write_text
from fedhet.runs.record.schema import read_yaml
from fedhet.runs.record.scores import DETAILS, detailed, method_name, privacy_spent

if TYPE_CHECKING:
    from jinja2 import Template
    from pandas import Series

FILE = "model_card.md"
_MOST_CLASSES = 20  # of a confusion matrix in the card; summary.json has larger ones
_MOST_NAMES = 100  # of classes or columns in the card; partition.json has all of them
_PACKAGES = ("python", "fedhet", "torch", "torchvision", "flwr", "numpy")
_DECLARED = ("dataset", "partition", "model", "method", "plugin", "server_opt", "merge", "client")
# A template of jinja2, which escapes each value.
TEMPLATE = """\
# {{ method }} on {{ summary.dataset or "data given as objects" }}

A model that was trained by federated learning with [Flower](https://flower.ai) and fedhet.\
 This card was written at the end of the run.

## The model

|  |  |
| --- | --- |
| architecture | {{ summary.model }} |
| method | {{ method }} |
| file | model.safetensors |
| SHA-256 of the file | {{ digest }} |
| digest of the weights (weights\\_sha256) | {{ summary.weights_sha256 }} |
{% if "global" not in summary.models %}
| note | there is no global model: the file has the weights that clients share\
 ({{ summary.models | join(", ") }} models) |
{% endif %}

## Inputs and outputs

|  |  |
| --- | --- |
{% if "shape" in partition %}
| shape of an input | {{ partition.shape | tuple }} |
| what is predicted | {{ partition.target }} |
{% if partition.columns %}
| columns | {{ partition.columns | names }} |
{% endif %}
{% if partition.numbers %}
| numbers | {{ partition.numbers | names }} |
{% else %}
| {{ partition.classes | length }} classes | {{ partition.classes | names }} |
{% endif %}
{% if partition.missing in ("drop", "median") %}
| missing values | {{ partition.missing }} |
{% endif %}
{% if partition.normalised and partition.normalised.mean == "own" %}
| normalised by | mean and std of each client's own training part |
{% elif partition.normalised %}
| normalised by mean | {{ partition.normalised.mean | numbers }} |
| normalised by std | {{ partition.normalised.std | numbers }} |
{% else %}
| tokens | {{ partition.vocabulary }} |
{% endif %}
{% if partition.target_scale %}
| mean of the numbers | {{ partition.target_scale.mean | numbers }} |
| std of the numbers | {{ partition.target_scale.std | numbers }} |
{% endif %}
{% else %}
| target | {{ config.task.target }} |
| number of outputs | {{ config.task.classes }} |
| transform | {{ config.task.transform }} |
{% endif %}

## How good it is

{% if target.score() %}
| score | samples | clients | mean | lowest | highest |
| --- | --- | --- | --- | --- | --- |
| {{ target.title }} of the final model | global test set |  | {{ last | score }} |  |  |
{% for name, view, split, values in clients %}
| {{ name }} of the {{ view }} models | clients, {{ split }} | {{ values | length }}\
 | {{ values.mean() | score }} | {{ values.min() | score }} | {{ values.max() | score }} |
{% endfor %}

{% for place, found in details.items() %}
{% if loop.first %}
| model and samples | {{ words.values() | join(" | ") | safe }} |
| --- |{{ (" --- |" * (words | length)) | safe }}
{% endif %}
| {{ place }} {% for name in words %}| {{ found[name] | score }} {% endfor %}|
{% endfor %}

{% for place, found in details.items() %}
{% if found.confusion | length <= most %}
{{ place }}: how many samples of a class (row) are predicted as each class (column)

| |{% for name in classes %} {{ name }} |{% endfor %} recall |
| --- |{{ (" --- |" * (found.confusion | length + 1)) | safe }}
{% for row in found.confusion %}
| {{ classes[loop.index0] }} | {{ row | join(" | ") | safe }} |\
 {{ (row[loop.index0] / (row | sum) if row | sum else none) | score }} |
{% endfor %}

{% endif %}
{% endfor %}
Each client has few samples, so single values scatter. The range over the clients shows how much\
 worse the model works for some of them.
{% else %}
The last loss on the global test set is {{ summary.loss | score }}.
{% endif %}

## How it was trained

|  |  |
| --- | --- |
| data | {{ summary.dataset or "given as objects" }} |
| clients | {{ partition.clients }}, partition {{ partition.name }} |
| training samples | {{ sizes | sum }}: {{ sizes | min }} to {{ sizes | max }} per client |
| rounds | {% for phase in summary.phases %}{{ phase.rounds }} of {{ phase.name }}\
{{ "" if loop.last else ", " }}{% endfor %} |
| share of the clients in a round | {{ config.fraction }} |
| seed | {{ summary.seed }} |
| failed replies | {{ summary.failures | length }} |
| seconds | {{ "%.1f" | format(summary.seconds.total) }} |
| engine and device | {{ environment.engine }}, {{ environment.device }} |
| bit exact | {{ "yes" if environment.bit_exact else "no" }} |
{% for name, value in privacy %}
| {{ name }} | {{ value }} |
{% endfor %}
| versions | {{ versions | join(", ") }} |

## Settings

{% if environment.own_loop %}
The clients trained by a loop of the app's owner, so the settings of `client` do not describe it.

{% endif %}
```yaml
{{ settings | safe }}```

## Use it

{% if summary.dataset is none %}
`fedhet.load(RUN, model=Net())` returns the torch module. RUN is the folder of this card, and Net\
 the class of the model.
{% else %}
{% set own = "" if "global" in summary.models else " --client 0 --view " ~ summary.models[0] %}
{% if partition.normalised and partition.normalised.mean == "own" %}
{% set own = own ~ " --inputs-of 0" %}
{% endif %}
```bash
python -m fedhet predict RUN FILE...{{ own | safe }}
python -m fedhet export RUN --to onnx{{ own | safe }}
```

RUN is the folder of this card. Both commands normalise the inputs themselves; from Python,\
 `fedhet.load(RUN)` returns the torch module, which takes normalised inputs.
{% endif %}
"""


def write_card(folder: Path, summary: dict[str, Any], partition: dict[str, Any]) -> None:
    """Write the card of a successful run; if that fails, log the reason.

    Args:
        folder: the run folder, complete except for the card.
        summary: the content of its summary.json.
        partition: the content of its partition.json.
    """
    try:
        write_text(folder / FILE, card(folder, summary, partition))
    except (OSError, ValueError, KeyError) as error:
        # The card repeats other files, so a successful run must not fail because of it.
        log.warning("no %s: %s", FILE, error)


def card(folder: Path, summary: dict[str, Any], partition: dict[str, Any]) -> str:
    """Return the card as Markdown.

    Args:
        folder: the run folder.
        summary: the content of its summary.json.
        partition: the content of its partition.json.
    """
    environment = read_object(folder / "environment.json")
    config = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    chosen = {key: config[key] for key in ("task", *_DECLARED) if key in config}
    target = KINDS[summary["target"]]
    details = detailed(summary)
    words = {n: w for n, w in DETAILS.items() if any(n in found for found in details.values())}
    with (folder / "model.safetensors").open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()

    text = _template().render(
        method=method_name(summary),
        summary=summary,
        partition=partition,
        config=config,
        environment=environment,
        target=target,
        digest=digest,
        last=(summary.get(target.score()) or {}).get("last"),
        clients=_last_clients(folder, {target.score(): target.title, **words}),
        details=details,
        words=words,
        most=_MOST_CLASSES,
        classes=partition.get("classes") or list(range(config.get("task", {}).get("classes", 0))),
        sizes=partition["train_sizes"],
        privacy=privacy_spent(summary),
        versions=[f"{name} {environment[name]}" for name in _PACKAGES if environment.get(name)],
        settings=OmegaConf.to_yaml(chosen).replace("```", "'''"),  # ``` would end the block
    )
    return f"{text.rstrip()}\n"


@cache
def _template() -> Template:
    import jinja2

    def names(values: list[str]) -> str:
        more = f", ... ({len(values)} in all)" if len(values) > _MOST_NAMES else ""
        return ", ".join(values[:_MOST_NAMES]) + more

    jinja = jinja2.Environment(finalize=escaped, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {
        "names": names,
        "numbers": lambda values: names([f"{value:.6g}" for value in values]),
        "score": lambda value: "none" if value is None else f"{value:.4f}",
        "tuple": tuple,
    }
    return jinja.from_string(TEMPLATE)


def escaped(value: Any) -> str:
    """Return a value as one line of text in which Markdown finds no mark-up."""
    from markupsafe import Markup

    if isinstance(value, Markup):  # marked as safe in the template
        return value
    return "".join(f"\\{c}" if c in "\\|`*_[]<>#" else c for c in clean(str(value)))


def _last_clients(folder: Path, titles: dict[str, str]) -> list[tuple[str, str, str, Series]]:
    """Return (title, model, split, the clients' values) of each score at the last evaluation."""
    files = sorted((folder / "clients").glob("*.parquet"))
    if not files:
        return []
    import pandas

    frame = pandas.read_parquet(files[-1])
    return [
        (title, str(model), str(split), values)
        for metric, title in titles.items()
        for (model, split), values in frame[frame["metric"] == metric].groupby(["model", "split"])[
            "value"
        ]
    ]
