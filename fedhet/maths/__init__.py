"""The papers' equations as pure functions of tensors: no Flower, no Hydra, no input or output."""
