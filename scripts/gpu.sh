#!/usr/bin/env bash
# What needs a GPU: every method against the CPU, and the speed of local training. It takes ten
# minutes at most. docs/performance.md#gpu says what is measured.
#
#   scripts/gpu.sh [--pretend] [folder of wheels]
#
# Python 3.12 with torch, torchvision and numpy is enough, without Flower, Hydra or Ray. Three small
# packages that may be missing there are taken from the folder, in which this puts them:
#
#   pip download --only-binary :all: --no-deps --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
#     -d wheels greenlet safetensors threadpoolctl
#
# FedGMM also needs scikit-learn, scipy and joblib; its line fails where they are missing.
# --pretend runs everything at tiny sizes on the pretended accelerator of the tests, without a GPU.
# A table goes to stdout, and the same as gpu.json into $OUT if that is set.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
options=()
if [[ ${1:-} == --pretend ]]; then options+=(--pretend); shift; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for wheel in ${1:+"$1"/*.whl}; do python -m zipfile -e "$wheel" "$work"; done
# The last minute is for what is being measured when the time is over.
PYTHONPATH=$work:$root timeout 600 python "$root/scripts/gpu" --seconds 540 ${options[@]+"${options[@]}"}
