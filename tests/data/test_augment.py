"""crop_flip: against torchvision's own transforms, image by image; and what a run makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedhet
from fedhet.data import Dataset, Normalize
from fedhet.data.augment import PADDING, CropFlip, augmentation
from fedhet.messages import Broadcast, LocalSettings, Update
from fedhet.methods.fedavg import FedAvgClient
from fedhet.plugin import Plugin
from fedhet.site import Site
from fedhet.state import MemoryStore
from fedhet.task import ClientData, Samples, Task

MEAN, STD = (0.49, 0.48, 0.44), (0.247, 0.243, 0.261)
PIXELS = torch.randint(
    0, 256, (20, 3, 6, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


def crop_flip() -> CropFlip:
    found = augmentation(
        Dataset(
            "toy",
            PIXELS,
            torch.zeros(20, dtype=torch.int64),
            Samples(PIXELS[:1], [0]),
            ("a",),
            MEAN,
            STD,
            augment="crop_flip",
        )
    )
    assert found is not None
    return found


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    return Normalize(MEAN, STD)(pixels.float().div(255).view(-1, *pixels.shape[-3:])).view(
        pixels.shape
    )


def candidates(image: torch.Tensor) -> dict[tuple[int, int, bool], torch.Tensor]:
    """All that torchvision's Pad, crop and flip, then normalisation, can make of one image of raw
    pixels."""
    from torchvision.transforms import functional

    padded = functional.pad(image, [PADDING] * 4)
    crops = {
        (y, x): functional.crop(padded, y, x, *image.shape[1:])
        for y in range(2 * PADDING + 1)
        for x in range(2 * PADDING + 1)
    }
    return {
        (y, x, flip): normalized(functional.hflip(crop) if flip else crop)
        for (y, x), crop in crops.items()
        for flip in (False, True)
    }


def test_each_image_becomes_one_of_torchvisions_crops_bit_for_bit() -> None:
    found = crop_flip()(normalized(PIXELS), torch.Generator().manual_seed(1))
    seen: list[tuple[int, int, bool]] = []
    for image, result in zip(PIXELS, found, strict=True):
        seen += [
            which
            for which, candidate in candidates(image).items()
            if torch.equal(candidate, result)
        ][:1]
    assert len(seen) == len(PIXELS)
    assert len(set(seen)) > 12  # of 162; each image has its own


def test_all_crops_and_flips_are_equally_likely() -> None:
    n = 16200
    # every pixel differs, so a result tells its crop
    image = torch.arange(1.0, 31).view(1, 1, 6, 5).expand(n, 1, 6, 5)
    results = CropFlip((0.0,))(image, torch.Generator().manual_seed(2)).flatten(1).to(torch.int64)
    kinds, held = torch.unique(results, dim=0, return_counts=True)
    assert len(kinds) == 2 * 9 * 9
    # chi square of 161 degrees: above it once in 3,000 times
    assert float((held - 100).square().div(100).sum()) < 230


def test_the_input_is_left_alone_and_the_generator_decides() -> None:
    x = normalized(PIXELS)
    before = x.clone()
    a, b = (crop_flip()(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(x, before) and torch.equal(a, b)
    assert not torch.equal(a, crop_flip()(x, torch.Generator().manual_seed(4)))


def test_none_is_nothing_at_all() -> None:
    assert (
        augmentation(
            Dataset(
                "toy",
                PIXELS,
                torch.zeros(20, dtype=torch.int64),
                Samples(PIXELS[:1], [0]),
                ("a",),
                MEAN,
                STD,
            )
        )
        is None
    )


# ---- in training


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def task(seen: list[torch.Tensor] | None = None, n: int = 10) -> Task:
    """Images whose every pixel is the image's number; augmentation adds 100, 101, ... to the
    batches in their order."""

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        assert seen is not None
        seen.append(x)
        return x + 100 + torch.rand(1, generator=generator)

    x = torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 3, 2, 2).contiguous()
    clients = [ClientData(Samples(x, torch.arange(n) % 2)) for _ in range(3)]
    return Task(
        Flat,
        nn.CrossEntropyLoss(reduction="none"),
        clients,
        Samples(x, torch.arange(n) % 2),
        2,
        augment=None if seen is None else augment,
    )


def site(seen: list[torch.Tensor] | None) -> Site:
    return Site(task(seen), device=torch.device("cpu"), seed=0)


def message(
    site: Site,
    local: LocalSettings,
    plugins: dict[str, str],
    pid: int = 0,
    step: int = 1,
    **extras: int,
) -> Broadcast:
    return Broadcast(
        phase="train",
        step=step,
        round=step,
        slot="model",
        weights=site.initial,
        extras=dict(extras),
        local=local,
        trains=True,
        plugins=plugins,
        pid=pid,
    )


class Spy(Plugin):
    """Notes what a batch holds."""

    name = "spy"

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def losses(self, batch: object) -> torch.Tensor:
        self.batches.append((batch.x, batch.index))  # type: ignore[attr-defined]
        return torch.zeros(len(batch.y))  # type: ignore[attr-defined]


def trained(
    pid: int = 0, step: int = 1
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    seen: list[torch.Tensor] = []
    spy, place = Spy(), site(seen)
    reply = FedAvgClient(place, [spy], MemoryStore()).handle(
        message(place, LocalSettings(0.1, 2, 4), {"spy": spy.digest()}, pid, step)
    )
    assert isinstance(reply, Update), reply
    return seen, spy.batches


def test_batches_are_augmented_and_stay_aligned() -> None:
    seen, batches = trained()
    assert len(seen) == len(batches) == 6  # two epochs of 4 + 4 + 2
    draws = []
    for raw, (x, index) in zip(seen, batches, strict=True):
        # what is augmented is the data themselves, every time anew
        assert torch.equal(raw[:, 0, 0, 0], index.float())
        draws.append(float((x - raw).mean()))
    assert all(100 <= value <= 101 for value in draws) and len(set(draws)) == 6
    assert [torch.equal(a, b) for (a, _), (b, _) in zip(batches, trained()[1], strict=True)] == [
        True
    ] * 6
    for other in ({"pid": 1}, {"step": 2}):
        assert float((trained(**other)[1][0][0] - trained(**other)[0][0]).mean()) != pytest.approx(
            draws[0], abs=1e-4
        )


def write(folder: Path) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, n in (("train", 12), ("test", 4)):
        for c in range(2):
            (folder / part / f"{c}").mkdir(parents=True)
            for i in range(n):
                Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
                    folder / part / f"{c}" / f"{i}.png"
                )


RUN = [
    "dataset=cifar10",
    "model=mlp",
    "partition=iid",
    "partition.clients=2",
    "rounds=1",
    "client.epochs=1",
    "client.batch_size=4",
]
AUGMENT = "dataset.augment=crop_flip"


def run(tmp_path: Path, *overrides: str, folder: str) -> fedhet.Run:
    return fedhet.run(
        [*RUN, f"data_dir={tmp_path}", f"hydra.run.dir={tmp_path / folder}", *overrides]
    )


def test_a_run_augments_where_it_is_told(tmp_path: Path) -> None:
    write(tmp_path / "cifar10")
    on, off = (
        run(tmp_path, f"dataset.augment={key}", folder=key).summary["weights_sha256"]
        for key in ("crop_flip", "none")
    )
    assert on != off


@pytest.mark.matrix
def test_one_worker_and_two_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "cifar10")
    one, two = (
        run(tmp_path, AUGMENT, f"engine.workers={n}", folder=f"{n}").summary["weights_sha256"]
        for n in (1, 2)
    )
    assert one == two


@pytest.mark.matrix
def test_fedgmms_samples_are_augmented_too(tmp_path: Path) -> None:
    write(tmp_path / "cifar10")
    on, again, off = (
        run(tmp_path, "method=fedgmm", key, folder=str(i)).summary["weights_sha256"]
        for i, key in enumerate((AUGMENT, AUGMENT, "dataset.augment=none"))
    )
    assert on == again != off


def test_clients_do_not_train_as_one() -> None:
    from fedhet.engines.vectorized import obstacle

    found = [
        obstacle(FedAvgClient(site(seen), [], MemoryStore()), LocalSettings(0.1, 1, 4))
        for seen in ([], None)
    ]
    assert "dataset.augment=none" in str(found[0]) and found[1] is None


def test_fedsgd_augments_its_full_gradient() -> None:
    from fedhet.methods.fedsgd import CHUNK, FedSGDClient

    seen: list[torch.Tensor] = []
    place = site(seen)
    reply = FedSGDClient(place, [], MemoryStore()).handle(
        message(place, LocalSettings(0.1, 1, 4), {}, **{CHUNK: 4})
    )
    assert isinstance(reply, Update), reply
    assert sorted(float(value) for part in seen for value in part[:, 0, 0, 0]) == list(range(10))
