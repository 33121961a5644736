"""Image datasets, each with a loader of its name.

A loader is the Hydra target `fedhet.data.images.<name>` (conf/dataset). It imports what it needs
only when it is called, and downloads nothing. Idx files are mapped as they are; every other format
is decoded once into arrays, which are then mapped (fedhet.data.array_cache). `mean` and `std` refer
to pixels in [0, 1]: one number, or one for each channel.
"""

from fedhet.data.images.cifar import cifar10, cifar100
from fedhet.data.images.embedded import digits
from fedhet.data.images.folders import chest_xray, cinic10, image_folder, tiny_imagenet
from fedhet.data.images.idx import emnist, fashion_mnist, mnist

__all__ = [
    "chest_xray",
    "cifar10",
    "cifar100",
    "cinic10",
    "digits",
    "emnist",
    "fashion_mnist",
    "image_folder",
    "mnist",
    "tiny_imagenet",
]
