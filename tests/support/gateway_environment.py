"""Virtual environments made once: that of `gateway_clients.txt`, for the clients of a gateway."""

import hashlib
import json
import os
import shutil
import subprocess
import venv
from pathlib import Path
from typing import Any

from tests.support.project import ROOT, one_at_a_time

NEEDED = ROOT / "tests/data/gateway_clients.txt"


_OFFLINE = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "0",  # its clients would refuse any address
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
}
"""Variables by which clients ask nobody but the gateway."""


PACKAGES = ROOT / "tests/data/gateway_clients_npm.json"


def run_with_node(script: str, *words: str) -> Any:
    """The JSON that a script of this folder prints, with the packages of `PACKAGES`."""
    content = PACKAGES.read_bytes() + (ROOT / "tests/support" / script).read_bytes()
    home = ROOT / ".cache/gateway_clients_npm" / hashlib.sha256(content).hexdigest()[:16]
    with one_at_a_time("gateway_clients_npm"):
        if not (home / "complete").exists():
            home.mkdir(parents=True, exist_ok=True)
            shutil.copy(PACKAGES, home / "package.json")
            shutil.copy(ROOT / "tests/support" / script, home)
            install = ["npm", "install", "--silent", "--no-audit", "--no-fund"]
            subprocess.run(install, cwd=home, check=True, timeout=600)
            (home / "complete").touch()
    command = ["node", str(home / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout)


def python_with(needed: Path) -> Path:
    """Python of a virtual environment with the packages of a file of requirements."""
    home = ROOT / ".cache" / needed.stem / hashlib.sha256(needed.read_bytes()).hexdigest()[:16]
    with one_at_a_time(needed.stem):
        if not (home / "complete").exists():
            venv.create(home, with_pip=True, clear=True)
            python = str(home / "bin/python")
            install = [python, "-m", "pip", "install", "--quiet", "-r", str(needed)]
            subprocess.run(install, check=True, timeout=600)
            (home / "complete").touch()
    return home / "bin/python"


def run_with_clients(script: str, *words: str) -> str:
    """Output of a script of this folder that runs in the environment and must end without error."""
    done = subprocess.run(
        [python_with(NEEDED), ROOT / "tests/support" / script, *words],
        env={**os.environ, **_OFFLINE},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
