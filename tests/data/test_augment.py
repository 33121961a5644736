"""crop_flip: compared with torchvision's transforms image by image, and used in training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from composing import composed
from data.image_data import save_image
from torch import nn

from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import Batch
from fedhet.core.kernel import Message, Plugin, State, Term
from fedhet.core.messages import Broadcast, LocalSettings, Upload
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.trees import AnyTree, Tree
from fedhet.core.workspace import Workspace
from fedhet.data.dataset import Dataset
from fedhet.data.federation import PADDING, CropFlip, Normalize, augmentation
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedsgd import FedSGD
from fedhet.runs.stores import MemoryStore
from fedhet.testing import Federation, run_quietly

MEAN, STD = (0.49, 0.48, 0.44), (0.247, 0.243, 0.261)
RANDOM = torch.Generator().manual_seed(0)
PIXELS = torch.randint(0, 256, (20, 3, 6, 5), generator=RANDOM, dtype=torch.uint8)


def dataset(augment: str) -> Dataset:
    y = torch.zeros(20, dtype=torch.int64)
    test = Samples(PIXELS[:1], [0])
    return Dataset("toy", PIXELS, y, test, ("a",), MEAN, STD, augment=augment)


def crop_flip() -> CropFlip:
    augment = augmentation(dataset("crop_flip"))
    assert augment is not None
    return augment


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    batch = pixels.float().div(255).view(-1, *pixels.shape[-3:])
    return Normalize(MEAN, STD)(batch).view(pixels.shape)


def candidates(image: torch.Tensor) -> dict[tuple[int, int, bool], torch.Tensor]:
    """All results that torchvision's pad, crop, flip and normalisation can have for one image."""
    from torchvision.transforms import functional

    padded = functional.pad(image, [PADDING] * 4)
    crops = {
        (y, x): functional.crop(padded, y, x, *image.shape[1:])
        for y in range(2 * PADDING + 1)
        for x in range(2 * PADDING + 1)
    }
    return {
        (y, x, flip): normalised(functional.hflip(crop) if flip else crop)
        for (y, x), crop in crops.items()
        for flip in (False, True)
    }


def test_each_image_becomes_one_of_torchvisions_crops_bit_for_bit() -> None:
    results = crop_flip()(normalised(PIXELS), torch.Generator().manual_seed(1))
    seen: list[tuple[int, int, bool]] = []
    for image, result in zip(PIXELS, results, strict=True):
        matches = [
            which
            for which, candidate in candidates(image).items()
            if torch.equal(candidate, result)
        ]
        seen += matches[:1]
    assert len(seen) == len(PIXELS)
    assert len(set(seen)) > 12  # of 162; each image has its own


def test_all_crops_and_flips_are_equally_likely() -> None:
    n = 16200
    # every pixel differs, so a result identifies its crop
    image = torch.arange(1.0, 31).view(1, 1, 6, 5).expand(n, 1, 6, 5)
    results = CropFlip((0.0,))(image, torch.Generator().manual_seed(2)).flatten(1).to(torch.int64)
    kinds, counts = torch.unique(results, dim=0, return_counts=True)
    assert len(kinds) == 2 * 9 * 9
    # chi square with 161 degrees of freedom: exceeded once in 3,000 times
    assert float((counts - 100).square().div(100).sum()) < 230


def test_the_input_is_left_alone_and_the_generator_decides() -> None:
    x = normalised(PIXELS)
    before = x.clone()
    a, b = (crop_flip()(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(x, before) and torch.equal(a, b)
    assert not torch.equal(a, crop_flip()(x, torch.Generator().manual_seed(4)))


def test_none_is_nothing_at_all() -> None:
    assert augmentation(dataset("none")) is None


# ---- in training


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


def task(seen: list[torch.Tensor] | None = None, n: int = 10) -> Task:
    """All pixels of an image are its number; augmentation adds a random number above 100."""

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        assert seen is not None
        seen.append(x)
        return x + 100 + torch.rand(1, generator=generator)

    x = torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 3, 2, 2).contiguous()
    samples = Samples(x, torch.arange(n) % 2)
    return Task(
        Flat,
        nn.CrossEntropyLoss(reduction="none"),
        [ClientData(samples)] * 3,
        samples,
        2,
        augment=None if seen is None else augment,
    )


def workspace(seen: list[torch.Tensor] | None) -> Workspace:
    return Workspace(task(seen), device=torch.device("cpu"), seed=0)


def message(
    workspace: Workspace,
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
        weights=workspace.initial,
        extras=dict(extras),
        local=local,
        trains=True,
        plugins=plugins,
        pid=pid,
    )


@dataclass(frozen=True, kw_only=True)
class Spy(Plugin):
    """Records the batches."""

    name = "spy"
    batches: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]]

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        return [Term("loss", self._look)]

    def _look(self, params: AnyTree, batch: Batch, own: Tree) -> torch.Tensor:
        self.batches.append((batch.x, batch.index))
        return torch.zeros(len(batch.y))


def trained(
    pid: int = 0, step: int = 1
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The raw batches that were augmented, and (x, index) of those that were trained on."""
    seen: list[torch.Tensor] = []
    Spy.batches = []
    spy, place = Spy(), workspace(seen)
    method = FedAvg()
    digests = {"method": method.digest, "spy": spy.digest}
    msg = message(place, LocalSettings(0.1, 2, 4), digests, pid, step)
    reply = FedClient(place, method, [spy], MemoryStore()).handle(msg)
    assert isinstance(reply, Upload), reply
    return seen, spy.batches


def test_batches_are_augmented_and_stay_aligned() -> None:
    seen, batches = trained()
    assert len(seen) == len(batches) == 6  # two epochs of 4 + 4 + 2
    draws = []
    for raw, (x, index) in zip(seen, batches, strict=True):
        # each batch is augmented from the data themselves, not from an earlier augmentation
        assert torch.equal(raw[:, 0, 0, 0], index.float())
        draws.append(float((x - raw).mean()))
    assert all(100 <= value <= 101 for value in draws) and len(set(draws)) == 6
    _, again = trained()
    for (x, _), (x_again, _) in zip(batches, again, strict=True):
        assert torch.equal(x, x_again)
    for other in ({"pid": 1}, {"step": 2}):
        seen, batches = trained(**other)
        draw = float((batches[0][0] - seen[0]).mean())
        assert draw != pytest.approx(draws[0], abs=1e-4)


# ---- in runs


@pytest.fixture
def image_folder(tmp_path: Path) -> None:
    """Random images of two classes as CIFAR-10."""
    draw = np.random.default_rng(0)
    for part, n in (("train", 12), ("test", 4)):
        for c in range(2):
            place = tmp_path / "cifar10" / part / f"{c}"
            place.mkdir(parents=True)
            for i in range(n):
                save_image(place / f"{i}.png", draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))


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


def digest(tmp_path: Path, *overrides: str, folder: str) -> str:
    """The weights' digest of a run."""
    settings = composed(*RUN, f"data_dir={tmp_path}", *overrides)
    return run_quietly(settings, tmp_path / folder).summary["weights_sha256"]


@pytest.mark.usefixtures("image_folder")
def test_a_run_augments_if_configured(tmp_path: Path) -> None:
    on = digest(tmp_path, AUGMENT, folder="on")
    off = digest(tmp_path, "dataset.augment=none", folder="off")
    assert on != off


@pytest.mark.matrix
@pytest.mark.usefixtures("image_folder")
def test_one_worker_and_two_give_the_same_bytes(tmp_path: Path) -> None:
    one = digest(tmp_path, AUGMENT, "engine.workers=1", folder="one")
    two = digest(tmp_path, AUGMENT, "engine.workers=2", folder="two")
    assert one == two


@pytest.mark.matrix
@pytest.mark.usefixtures("image_folder")
def test_fedgmms_samples_are_augmented_too(tmp_path: Path) -> None:
    on = digest(tmp_path, "method=fedgmm", AUGMENT, folder="on")
    again = digest(tmp_path, "method=fedgmm", AUGMENT, folder="again")
    off = digest(tmp_path, "method=fedgmm", "dataset.augment=none", folder="off")
    assert on == again != off


def test_fedsgd_augments_its_full_gradient() -> None:
    seen: list[torch.Tensor] = []
    Federation(task(seen), FedSGD, options={"chunk": 4}, batch_size=4).step()
    assert [len(batch) for batch in seen] == [4, 4, 2] * 3
    numbers = torch.cat([batch[:, 0, 0, 0] for batch in seen]).view(3, 10)
    assert all(sorted(of.tolist()) == list(range(10)) for of in numbers)
