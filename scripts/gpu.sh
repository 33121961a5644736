#!/usr/bin/env bash
# The measurements that need a GPU: every method against the CPU, and the speed of local training.
# It takes at most ten minutes. docs/performance.md#gpu describes the measurements.
#
#   scripts/gpu.sh [--pretend] [folder of wheels]
#
# The machine needs only Python 3.12 with torch, torchvision and numpy; not Flower, Hydra or Ray.
# Three small packages may be missing there. Download them into a folder, and name the folder:
#
#   pip download --only-binary :all: --no-deps --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
#     -d wheels greenlet safetensors threadpoolctl
#
# FedGMM also needs scikit-learn, scipy and joblib; without them, its line fails.
# --pretend runs everything at tiny sizes on the pretended accelerator of the tests, without a GPU.
# The script prints a table. If $OUT is set, it also writes the table into $OUT/gpu.json.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
options=()
if [[ ${1:-} == --pretend ]]; then options+=(--pretend); shift; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for wheel in ${1:+"$1"/*.whl}; do python -m zipfile -e "$wheel" "$work"; done
# The last minute is for the measurement that is running after 540 seconds.
PYTHONPATH=$work:$root timeout 600 python "$root/scripts/gpu" --seconds 540 ${options[@]+"${options[@]}"}
