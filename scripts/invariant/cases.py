"""The configurations to compare: a short name for each, and its overrides.

All of them train a small MLP on the digits for three rounds. Some methods refuse some settings; a
refusal is a result like any other. Deployments and Ray are left out: they have tests that compare
them with engine=local. This module must not import fedhet, because it serves two trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

# The settings of every case; a case may replace them, and "null" leaves a setting out.
COMMON = {
    "method": "fedavg",
    "dataset": "digits",
    "model": "mlp",
    "model.hidden": "[16]",
    "partition": "dirichlet",
    "partition.clients": "5",
    "rounds": "3",
    "client.epochs": "1",
    "device": "cpu",
    "figures": "false",
}
# Phases before the training, and steps on the server, take long by default: these make them short.
DENSITY = [
    f"plugin.feddisk.{key}=2" for key in ("made_max_rounds", "local_max_epochs", "clf_max_epochs")
]
SHORT = {
    "fedgen": ["method.server_steps=3", "method.hidden=8", "method.noise_dim=4"],
    "fedlex": ["plugin.fedlex.e_exp=2", "plugin.fedlex.c_exp=3"],
    "feddisk": DENSITY,
    "feddiskab": DENSITY,
}
# The base methods for SETTINGS: FedAvg with its mean, and three with a merge of their own.
HOSTS = ("fedavg", "scaffold", "fednova", "fedsa")
NOISE = "privacy.noise=0.5 eval.clients=false"  # scores would leave the clients without noise
SETTINGS = [
    *[f"server_opt={name}" for name in ("fedadagrad", "fedadam", "fedavgm", "fedyogi")],
    "server_opt=fedavgm server_opt.nesterov=true server_opt.lr=0.5",
    "merge=krum merge.attackers=1 partition.clients=7",
    "merge=krum merge.attackers=1 merge.keep=1 partition.clients=7",
    "merge=median",
    "merge=trimmed_mean",
    "merge=trimmed_mean merge.share=0.4",
    "merge=norm_clip merge.factor=0.7",
    "merge=norm_clip merge.norm=0.1",
    "merge=norm_filter merge.factor=1.05 on_failure=skip",
    *[f"model.norm=batch buffers={mode}" for mode in ("average", "local", "frozen")],
    "client.momentum=0.9",
    "client.weight_decay=0.01",
    "client.clip=0.5",
    "client=adam",
    "client=adam client.weight_decay=0.01 client.clip=0.5",
    "client.schedule=cosine",
    "client.lr_decay=0.9",
    "client.steps=3",
    "client.epochs=2 client.batch_size=7",
    f"{NOISE} privacy.clip=1 privacy.delta=1e-5",
    f"{NOISE} privacy.clip=0.3 fraction=0.5",
    "eval.finetune_epochs=1",
    "eval.train=true",
    "eval.every=2",
    "fraction=0.5",
    "fraction=0.5 replies.oversample=0.5",
    "seed=1",
]
# Method -> the cases that need it.
OF_METHODS = {
    "fedavg": [
        "early_stopping.patience=1 early_stopping.min_delta=0.4",
        "eval.clients=false",
        "eval.last_k=2 eval.thresholds=[0.3,0.5]",
        "model=logistic model.hidden=null",
        "engine.fused=2",
        "engine.workers=2",
        "dataset.mean=auto dataset.std=auto",
    ],
    "scaffold": [
        "method.control=gradient",
        "method.control=gradient client=adam",
        "method.control_weights=uniform method.lr_g=0.5",
        "engine.workers=2",
        "engine.fused=2",
    ],
    "fednova": ["method.tau_eff=mean_steps", "client.momentum=0.9 client.weight_decay=0.01"],
    "fedsa": [
        "method.mic_scale=layer method.alpha_mode=shrink",
        "method.threshold=always method.client_weighting=samples method.cv_clip_quantile=0.9",
        "engine.workers=2",
    ],
    "fednorm": [
        "privacy.min_count=0",
        "privacy.min_count=1000",
        "plugin.fednorm.z_when=before_training",
    ],
    "fedgmm": [
        "privacy.min_count=0",
        "privacy.min_count=1000",
        "plugin.fedgmm.target=global_max plugin.fedgmm.max_components=3",
        "plugin.fedgmm.agg_count=augmented plugin.fedgmm.gen_weight=0.5",
        "engine.workers=2",
    ],
    "fedpcl": [
        "privacy.min_count=0",
        "privacy.min_count=1000",
        "method.denominator=others method.renormalise=true method.unseen=global",
        "engine.workers=2",
    ],
    "fedlex": [
        "plugin.fedlex.scope=model plugin.fedlex.minmax=all plugin.fedlex.refresh=all",
        "plugin.fedlex.order=mean_then_normalise plugin.fedlex.apply_to=update fraction=0.5",
        "plugin.fedlex.rescale=mean1 plugin.fedlex.g_min=0.1 plugin.fedlex.empty=all fraction=0.5",
    ],
    "feddisk": [
        "plugin.feddisk.ratio=outputs plugin.feddisk.masks=random",
        "plugin.feddisk.features=conditional plugin.feddisk.normalise=minmax2",
        "plugin.feddisk.binarise=true plugin.feddisk.made_optimizer=sgd",
    ],
    "fedgen": [
        "method.ensemble=samples method.noise=uniform",
        "method.kl=1 method.decay=0.9 method.lam=2",
    ],
    "fedbabu": ["method.finetune=head", "method.finetune=body", "fraction=0.5"],
    "feddyn": ["method.alpha=1 fraction=0.5", "engine.workers=2", "engine.fused=2"],
    "fedrep": ["method.joint=true", "method.head_epochs=0 fraction=0.5", "engine.fused=2"],
    "fedproto": ["privacy.min_count=0", "method.lam=0.1 fraction=0.5", "engine.fused=2"],
    "fedrod": ["method.init=copy method.gamma=0.5"],
    "fedsgd": ["method.batches=1", "method.chunk=16"],
    "sgdm": ["method.momentum_state=reset", "method.gamma=0.5 fraction=0.5"],
    "fedala": ["method.p=all method.s=50", "method.eta=0"],
    "fedbn": ["model.norm=batch", "model.norm=batch method.server_bn=average"],
    "ditto": [
        "eval.personal=false",
        "eval.personal_mb=0",
        "method.plocal_epochs=2 method.lam=0.1",
        "fraction=0.5 eval.finetune_epochs=1",
        "engine.workers=2",
    ],
}
PARTITIONS = [
    "partition=iid",
    "partition=dirichlet partition.alpha=1 partition.min_size=20",
    "partition=dirichlet partition.pool_test=true",
    "partition=dirichlet partition.noise=0.2",
    "partition=dirichlet partition.split=[0.6,0.2,0.2]",
    "partition=listed",
    "partition=listed partition.classes=[[0,1],[2,3,4],[5,6,7,8,9]]",
    "partition=noise",
    "partition=pathological",
    "partition=pathological partition.classes=4 partition.pool_test=true",
    *[f"partition=quantity partition.sizes={s}" for s in ("dirichlet", "linear", "square")],
    "partition=quantity partition.sizes=exponential",
    "partition=shards",
    # The partition of a run that the process makes first; see FIRST.
    "partition=saved partition.name='{first}' partition.clients=null",
    "partition=saved partition.name='{first}' partition.clients=null partition.split=[0.5,0.2,0.3]",
]
FIRST = "{first}"  # the folder of a run of the method without further settings
# The cases below read the files of files.py, in the folder {data}.
# Some of the table's columns of pixels, as a list of Hydra.
FEATURES = ",".join(f"p{row}{column}" for row in range(2, 6) for column in range(1, 7))
CSV = f"dataset=csv dataset.train='{{data}}/digits.csv' dataset.features=[{FEATURES}]"
OWNERS = "dataset.owner=writer partition=natural partition.clients=null"
SITES = (
    f"dataset=local dataset.sites=[a,b,c] dataset.features=[{FEATURES}]"
    " dataset.files={a:'{data}/a.csv',b:'{data}/b.csv',c:'{data}/c.csv'}"
    " partition=null partition.clients=null"
)
DATA = {
    "csv class": f"{CSV} dataset.label=label dataset.target=class",
    "csv number": f"{CSV} dataset.label=ink dataset.target=number partition=iid",
    "csv numbers": f"{CSV} dataset.label=[ink,height] dataset.target=number partition=iid",
    "csv labels": f"{CSV} dataset.label=[even,round] dataset.target=labels partition=iid",
    "csv natural": f"{CSV} dataset.label=label {OWNERS}",
    "csv test file": f"{CSV} dataset.label=label dataset.test='{{data}}/test.csv'",
    "csv scales": f"{CSV} dataset.label=label dataset.classes=10"
    " dataset.mean=[0.3] dataset.std=[0.4]",
    "parquet class": f"{CSV} dataset.label=label".replace("csv", "parquet"),
    "parquet natural": f"{CSV} dataset.label=label {OWNERS} partition.pool_test=true".replace(
        "csv", "parquet"
    ),
    "npz images": "dataset=npz dataset.file='{data}/images.npz'",
    "npz natural": "dataset=npz dataset.file='{data}/images.npz' dataset.owner=owner"
    " partition=natural partition.clients=null",
    "npz next_char": "dataset=npz dataset.file='{data}/text.npz' dataset.text=true"
    " dataset.target=next_char model=char_lstm model.hidden=8 client.batch_size=64",
    "npz text": "dataset=npz dataset.file='{data}/text.npz' dataset.text=true dataset.target=class"
    " model=text model.hidden=[8] model.embedding=4",
    "image_folder": "dataset=image_folder dataset.folder='{data}/images'",
    "image_folder resized": "dataset=image_folder dataset.folder='{data}/images' dataset.size=6"
    " dataset.colours=rgb dataset.mean=auto dataset.std=auto",
    "local": f"{SITES} dataset.label=label dataset.classes=10",
    "local number": f"{SITES} dataset.label=ink dataset.target=number"
    " dataset.test='{data}/test.csv'",
}
# The methods for the data sources above; FedNorm also measures the data.
OF_DATA = ("fedavg", "fednorm")
# tests/invariant compares these, and every method alone, with stored hashes.
FEW = (
    # With their own base methods, the plug-ins would compute the same as the methods.
    "fedavg+drift",
    "fednova+fedgmm",
    "fednova+moon",
    "fedsa+fedprox",
    "fedyogi+fedlex",
    "scaffold+feddisk",
    "scaffold+fedntd",
    "sgdm+fednorm",
    "fedavg merge=median",
    "fedavg client=adam",
    f"fedavg {NOISE} privacy.clip=1 privacy.delta=1e-5",
    "fedavg partition=iid",
    "fedavg partition=shards",
    "fedbn model.norm=batch",  # without batch norm it is FedAvg
)


def cases(methods: Iterable[str], plugins: Iterable[str]) -> dict[str, list[str]]:
    """Return the overrides of every configuration, by its name.

    Args:
        methods: the names in conf/method.
        plugins: the names in conf/plugin.
    """
    methods, plugins = list(methods), list(plugins)
    found = {method: _overrides(method) for method in methods}
    found |= {f"{m}+{p}": _overrides(m, plugin=p) for m in methods for p in plugins}
    of_all = {host: [*SETTINGS, *OF_METHODS.get(host, [])] for host in HOSTS}
    for method, lines in {**OF_METHODS, **of_all, "fedavg": of_all["fedavg"] + PARTITIONS}.items():
        if method in methods:
            found |= {f"{method} {line}": _overrides(method, line) for line in lines}
    found |= {f"{m} {name}": _overrides(m, line) for name, line in DATA.items() for m in OF_DATA}
    if len({slug(name) for name in found}) < len(found):
        raise AssertionError("two configurations would have the same folder")
    return found


def fast(methods: Iterable[str], plugins: Iterable[str]) -> dict[str, list[str]]:
    """Return the configurations that tests/invariant runs: all methods, and FEW."""
    methods = list(methods)
    every = cases(methods, plugins)
    return {name: every[name] for name in (*methods, *FEW)}


def names_in(conf: Path) -> tuple[list[str], list[str]]:
    """Return the names of the methods and of the plug-ins in a folder conf/."""
    methods, plugins = (
        sorted(path.stem for path in (conf / group).glob("*.yaml"))
        for group in ("method", "plugin")
    )
    return methods, plugins


def slug(name: str) -> str:
    """Return the name in a form for folders."""
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def _overrides(method: str, line: str = "", plugin: str = "") -> list[str]:
    short = [setting for name in (method, plugin) for setting in SHORT.get(name, [])]
    chosen = {"plugin": f"[{plugin}]"} if plugin else {}
    settings = {**COMMON, **_settings(short), "method": method, **chosen, **_settings(line.split())}
    return [f"{key}={value}" for key, value in settings.items() if value != "null"]


def _settings(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)
