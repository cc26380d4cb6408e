"""Files to a machine without a network: split, carried in pieces, joined, run where it stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.gpu import carry

PIECE = 1000


def test_files_arrive_in_pieces_and_stages_go_on_where_they_stopped(tmp_path: Path) -> None:
    sizes = {"small.whl": 10, "large.whl": 2 * PIECE + 7, "empty.whl": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(number % 251 for number in range(size)))
    (tmp_path / "inner").write_text("unpacked")
    with tarfile.open(tmp_path / "inner.tar", "w") as archive:
        archive.add(tmp_path / "inner", "project/inner")
    files = [tmp_path / name for name in (*sizes, "inner.tar")]
    count = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); "
        "p.write_text('x' + (p.read_text() if p.exists() else '')); "
    )

    def stage(name: str, code: str, **own: object) -> dict[str, object]:
        words = [sys.executable, "-c", count + code, f"{{home}}/{name}"]
        return {"name": name, "command": words, "minutes": 0, "environment": {}, **own}

    gpu = stage(
        "gpu", "raise SystemExit(not (p.parent / 'driver').exists())", required="no GPU is here"
    )
    pack = tmp_path / "pack"
    names = carry.split(
        files,
        pack,
        [
            gpu,
            stage(
                "first",
                "",
            ),
            stage("slow", "import time; (p.parent / 'fast').exists() or time.sleep(60)"),
        ],
        PIECE,
    )
    pieces = sorted((pack / "pieces").iterdir())
    assert [piece.name for piece in pieces] == names
    assert {piece.stat().st_size for piece in pieces[:-1]} == {PIECE}

    there, home = tmp_path / "there", tmp_path / "home"
    there.mkdir()
    for name in ("carry.py", carry.MANIFEST):
        shutil.copy(pack / name, there)

    def call(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-I", "-S", "carry.py", *words, "--home", str(home)]
        run = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)
        return run.returncode, run.stdout + run.stderr

    def arrive(name: str, content: bytes) -> tuple[int, str]:
        (there / name).write_bytes(content)
        answer = call(name)
        (there / name).unlink()
        return answer

    first, *rest = pieces
    code, said = arrive(first.name, first.read_bytes()[:-1] + b"?")
    assert (code, said.startswith("piece 000 is damaged")) == (1, True), said
    for piece in reversed(rest):
        assert arrive(piece.name, piece.read_bytes())[0] == 0
    assert call("--run") == (1, f"not run: 1 of {len(pieces)} pieces to come; next: 000\n")
    assert arrive(first.name, first.read_bytes())[1].startswith("all pieces are here")

    # Nothing runs without a GPU, and that is said in one line.
    assert call("--run") == (carry.NOTHING_RUNS, "not run: no GPU is here\n")
    for path in files[:-1]:
        assert (home / "files" / path.name).read_bytes() == path.read_bytes(), path.name
    assert (home / "project/inner").read_text() == "unpacked"
    assert not (home / "pieces").exists()

    (home / "driver").touch()
    arrivals = carry.Arrivals(json.loads((there / carry.MANIFEST).read_text()), home)
    assert arrivals.run(limit_s=6) == 0  # the slow one is cut short
    assert set(json.loads((home / carry.LEDGER).read_text())) == {"gpu", "first"}
    (home / "fast").touch()
    code, said = call("--run")
    assert (code, "first: ended with 0 before" in said) == (0, True), said
    assert [len((home / name).read_text()) for name in ("first", "slow")] == [1, 2]
