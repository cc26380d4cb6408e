"""Files to a machine without a network, in pieces: split here; joined, installed and run there.

Split, it writes a folder with ``carry.py`` (this file), ``manifest.json`` and ``pieces/``. There:
``python3 carry.py PIECE`` for each piece as it arrives, ``python3 carry.py --run`` once all have.
Nothing but the standard library, and no import of this project: it travels alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any, BinaryIO

PIECE = 56 * 2**20
"""Bytes of a piece: a call takes 64 MiB with all that goes along."""

LIMIT_S = 9 * 60.0
"""Of one ``--run``: calls there end at ten minutes."""

MANIFEST, LEDGER = "manifest.json", "ledger.json"
NOTHING_RUNS = 3


def split(
    files: list[Path], folder: Path, stages: list[dict[str, Any]], piece: int = PIECE
) -> list[str]:
    """Write the pieces of `files`, end to end, and the manifest; returns the pieces' names.

    Args:
        files: to carry, in the order they are joined in.
        folder: that gets them.
        stages: what ``--run`` runs, in order: `name`, `command` (words; ``{home}`` is the folder
            there), `minutes` that it may take, `environment`, and `required` where nothing after
            it can run without it: what is said then.
        piece: bytes of each piece but the last.
    """
    pieces = folder / "pieces"
    pieces.mkdir(parents=True)
    names: list[dict[str, str]] = []
    buffer = b""
    listed = []

    def put(data: bytes) -> None:
        name = f"{len(names):03d}"
        (pieces / name).write_bytes(data)
        names.append({"name": name, "sha256": hashlib.sha256(data).hexdigest()})

    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(piece - len(buffer)):
                digest.update(data)
                buffer += data
                if len(buffer) == piece:
                    put(buffer)
                    buffer = b""
        size = path.stat().st_size
        listed.append({"name": path.name, "size": size, "sha256": digest.hexdigest()})
    if buffer:
        put(buffer)
    manifest = {"pieces": names, "files": listed, "stages": stages}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(__file__, folder / "carry.py")
    return [each["name"] for each in names]


class Arrivals:
    """What has come to a machine so far.

    Args:
        manifest: of `split`.
        home: folder for all of it.
    """

    def __init__(self, manifest: dict[str, Any], home: Path) -> None:
        self.manifest, self.home = manifest, home
        self.pieces, self.files = home / "pieces", home / "files"
        self.pieces.mkdir(parents=True, exist_ok=True)

    def take(self, piece: Path) -> str:
        """Keep a piece that is whole; says what comes next.

        Raises:
            SystemExit: it is damaged, or of something else.
        """
        wanted = {each["name"]: each["sha256"] for each in self.manifest["pieces"]}
        if piece.name not in wanted:
            raise SystemExit(f"{piece.name} is not a piece of this manifest")
        found = _sha256(piece)
        if found != wanted[piece.name]:
            raise SystemExit(
                f"piece {piece.name} is damaged: its sha256 is {found[:12]}, not "
                f"{wanted[piece.name][:12]}. Carry it again"
            )
        part = self.pieces / f".{piece.name}"
        shutil.copyfile(piece, part)
        part.replace(self.pieces / piece.name)
        return self.next_step()

    def missing(self) -> list[str]:
        """Pieces that have not come; none once they were joined."""
        if self.files.is_dir():
            return []
        names = [each["name"] for each in self.manifest["pieces"]]
        return [name for name in names if not (self.pieces / name).is_file()]

    def next_step(self) -> str:
        """What to do now."""
        missing, every = self.missing(), len(self.manifest["pieces"])
        if missing:
            return f"{len(missing)} of {every} pieces to come; next: {missing[0]}"
        return "all pieces are here; next: python3 carry.py --run"

    def join(self) -> None:
        """Files of the pieces, each checked; the pieces are removed then.

        Raises:
            SystemExit: a piece is missing, or a file is not what was split.
        """
        if self.missing():
            raise SystemExit(f"not run: {self.next_step()}")
        if self.files.is_dir():
            return
        part = self.home / ".files"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        stream = _Stream([self.pieces / each["name"] for each in self.manifest["pieces"]])
        for each in self.manifest["files"]:
            stream.copy(each["size"], part / each["name"])
            if _sha256(part / each["name"]) != each["sha256"]:
                raise SystemExit(f"{each['name']} is not what was split: carry all pieces again")
        part.rename(self.files)
        shutil.rmtree(self.pieces)

    def unpack(self) -> None:
        """The archives among the files, side by side in the home folder."""
        for path in sorted(self.files.glob("*.tar")):
            mark = self.home / f".{path.name}"
            if not mark.exists():
                with tarfile.open(path) as archive:
                    archive.extractall(self.home)
                mark.touch()
                path.write_bytes(b"")  # the room may be scarce

    def run(self, limit_s: float) -> int:
        """Run the stages that have not ended yet, as many as fit; returns an exit code.

        A stage that is cut short begins again, with what it has left in the home folder.
        """
        ledger = self.home / LEDGER
        done: dict[str, Any] = json.loads(ledger.read_text()) if ledger.is_file() else {}
        end = time.monotonic() + limit_s
        for stage in self.manifest["stages"]:
            name, left = stage["name"], end - time.monotonic()
            if name in done:
                print(f"{name}: ended with {done[name]['exit']} before", flush=True)
                continue
            if left < min(stage["minutes"] * 60, limit_s - 60):
                print(f"next: {name}, by python3 carry.py --run", flush=True)
                return 0
            started = time.monotonic()
            code = self._run_stage(stage, left)
            if code is None:
                print(f"{name} was cut short: python3 carry.py --run goes on", flush=True)
                return 0
            if code and "required" in stage:
                print(f"not run: {stage['required']}", flush=True)
                return NOTHING_RUNS
            done[name] = {"exit": code, "seconds": round(time.monotonic() - started)}
            print(f"{name}: ended with {code}", flush=True)
            ledger.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        return max(int(each["exit"]) for each in done.values())

    def _run_stage(self, stage: dict[str, Any], limit_s: float) -> int | None:
        """The exit code; None where it took longer."""
        home = str(self.home)
        words = [word.replace("{home}", home) for word in stage["command"]]
        own = {name: text.replace("{home}", home) for name, text in stage["environment"].items()}
        try:
            variables = {**os.environ, **own}
            run = subprocess.run(words, cwd=home, env=variables, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            if "required" not in stage:
                print(f"{words[0]} cannot be started: {error}", flush=True)
            return NOTHING_RUNS
        return run.returncode


class _Stream:
    """Pieces as one stream of bytes."""

    def __init__(self, pieces: list[Path]) -> None:
        self._waiting = list(reversed(pieces))
        self._open: BinaryIO | None = None

    def copy(self, size: int, target: Path) -> None:
        with target.open("wb") as file:
            while size:
                if self._open is None:
                    self._open = self._waiting.pop().open("rb")
                data = self._open.read(min(size, 2**20))
                if not data:
                    self._open.close()
                    self._open = None
                size -= len(data)
                file.write(data)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Take pieces, or run; see above."""
    parser = argparse.ArgumentParser(prog="carry.py", description=__doc__)
    parser.add_argument("pieces", nargs="*", type=Path, help="that have arrived")
    parser.add_argument("--run", action="store_true", help="join and measure, or go on")
    parser.add_argument("--home", type=Path, default=Path("gpu-test"), help="kept between calls")
    parser.add_argument("--manifest", type=Path, default=Path(__file__).with_name(MANIFEST))
    given = parser.parse_args(arguments)
    manifest = json.loads(given.manifest.read_text(encoding="utf-8"))
    arrivals = Arrivals(manifest, given.home.resolve())
    for piece in given.pieces:
        print(arrivals.take(piece), flush=True)
    if not given.run:
        if not given.pieces:
            print(arrivals.next_step())
        return 0
    arrivals.join()
    arrivals.unpack()
    return arrivals.run(LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())
