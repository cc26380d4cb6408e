#!/usr/bin/env bash
# Run the tests in NVIDIA's tritonserver image, with its server, backends and Python
# (`make test-in-container`). The Python steps of its server import packages of its Python's version.
set -euo pipefail
venv=.cache/container-venv
if [ ! -x "$venv/bin/pytest" ]; then
  python3 -m pip install --quiet --target .cache/virtualenv virtualenv  # the image may lack `venv`
  PYTHONPATH=.cache/virtualenv python3 -m virtualenv --quiet "$venv"
  "$venv/bin/python" -m pip install --quiet --ignore-requires-python \
    --constraint build_scripts/triptych/constraints.txt --editable build_scripts/client \
    --editable ".[parquet,tensorrt,text2text,demo,dev]"
fi
export PATH="$PWD/$venv/bin:$PATH" PYTHONPYCACHEPREFIX="$PWD/.cache/container-bytecode"
exec "$venv/bin/python" -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
  -m "not long" "$@"
