"""Writes a file with digits for each of three nodes."""

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
for node in range(3):
    np.savez(f"node-{node}.npz", x=digits.images[node::3] / 16, y=digits.target[node::3])
