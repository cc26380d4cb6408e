"""Builds that were replaced: kept, listed, put back as they were; shared cores; bad input."""

import datetime
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.deploy_cases import write_built
from tests.support.mistakes import check_refused
from tests.support.project import lock_data
from triptych.interface.cli import app
from triptych.interface.cli.monitor import _candidate
from triptych.repository.history import rollback
from triptych.repository.manifest import build_id
from triptych.repository.render import Content
from triptych.repository.store import (
    HISTORY_LENGTH,
    find_build,
    history_folder,
    list_history,
    measure_history_bytes,
    write_models,
)

CORE = "tiny_core/1/model.onnx"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Pipelines `tiny` and `guest`, which shares its core; nothing has been replaced."""
    for name, core in (("tiny", {}), ("guest", {"shared_from": "tiny"})):
        repository = write_built(tmp_path, name, core=core)
        write_next(repository, name, 1)
    shutil.rmtree(history_folder(repository))
    return repository


def files_of(repository: Path, name: str) -> dict[str, bytes]:
    """What a server reads of a pipeline, and its lock."""
    lock = f"{name}/triptych.lock.json"
    paths = [*lock_data(repository, name)["files"], lock]
    return {path: (repository / path).read_bytes() for path in paths}


def write_next(repository: Path, name: str, number: int, **fields: Any) -> str:
    """Write another build of a pipeline, with `fields` of its lock; its id."""
    lock = {**lock_data(repository, name), **fields, "built_at": f"2026-01-01T00:00:{number:02d}"}
    labels = f"{name}_postprocess/1/labels.txt"
    content = {path: text for path, text in files_of(repository, name).items() if path != labels}
    content[f"{name}/config.pbtxt"] = (repository / name / "config.pbtxt").read_bytes()
    if number > 1:
        content[labels] = f"labels {number}".encode()
    if name == "tiny":
        content[CORE] = lock["core_key"].encode() * 30_000
    content.pop(f"{name}/triptych.lock.json")
    lock["files"] = {path: hashlib.sha256(text).hexdigest() for path, text in content.items()}
    lock["files"][f"{name}/README.md"] = hashlib.sha256(b"").hexdigest()
    files: dict[str, Content] = {**content, f"{name}/README.md": b""}
    gone = {path.partition("/")[0] for path in lock_data(repository, name)["files"]}
    gone -= {path.partition("/")[0] for path in files}
    files[f"{name}/triptych.lock.json"] = json.dumps(lock).encode()
    write_models(repository, files, retired=sorted(gone))
    return build_id(repository, name)


def test_what_was_replaced_comes_back_as_it_was(repository: Path) -> None:
    first, old = build_id(repository, "tiny"), files_of(repository, "tiny")
    (repository / "tiny/BENCH.md").write_text("# Speed of tiny\n\nBest: 9/s at 1 client.\n")
    inode = (repository / CORE).stat().st_ino
    second = write_next(repository, "tiny", 2)
    new = files_of(repository, "tiny")
    assert [kept.build for kept in list_history(repository, "tiny")] == [first]
    assert list_history(repository, "guest") == []
    assert len(old[CORE]) <= measure_history_bytes(repository, "tiny") < 2 * len(old[CORE])

    done = rollback(repository, "tiny", None)
    assert (done.builds, done.replaced) == ({"tiny": first}, {"tiny": second})
    assert done.changed == ("tiny", "tiny_postprocess")
    assert files_of(repository, "tiny") == old
    assert not (repository / "tiny_postprocess").exists()
    assert "9/s" in (repository / "tiny/BENCH.md").read_text()
    assert (repository / CORE).stat().st_ino == inode

    rollback(repository, "tiny", second[:6])
    assert files_of(repository, "tiny") == new
    assert rollback(repository, "tiny", None).builds == {"tiny": first}
    # The core is that of all three builds: the kept ones share one file.
    assert measure_history_bytes(repository, "tiny") < 2 * len(old[CORE])


def test_files_that_are_overwritten_in_place_leave_the_kept_builds_whole(repository: Path) -> None:
    builds = {build_id(repository, "tiny"): files_of(repository, "tiny")}
    for number in range(2, 5):
        build = write_next(repository, "tiny", number)
        builds[build] = files_of(repository, "tiny")
    for path in files_of(repository, "tiny"):
        with (repository / path).open("r+b") as file:  # as `cp` does
            file.truncate()
            file.write(b"overwritten")
    kept = [stored.build for stored in list_history(repository, "tiny")]
    assert len(kept) == 3
    for build in kept:
        rollback(repository, "tiny", build)
        assert files_of(repository, "tiny") == builds[build]
        with (repository / CORE).open("r+b") as file:
            file.write(b"overwritten")


def test_a_kept_build_that_names_files_elsewhere_is_refused(
    repository: Path, tmp_path: Path
) -> None:
    write_next(repository, "tiny", 2)
    (stored,) = list_history(repository, "tiny")
    now, around = files_of(repository, "tiny"), sorted(tmp_path.rglob("*"))
    (tmp_path / "outside").mkdir()
    (stored.folder / "evil").write_bytes(b"evil")
    manifest = stored.folder / "tiny/triptych.lock.json"
    data = json.loads(manifest.read_bytes())
    for name in ("../evil", "tiny/../../../../evil", "/evil", "tiny//evil", "evil", ""):
        data["files"] = {name: hashlib.sha256(b"evil").hexdigest()}
        manifest.write_text(json.dumps(data), encoding="utf-8")
        # An attacker who writes the manifest also names the folder.
        folder = stored.folder.rename(
            stored.folder.with_name(hashlib.sha256(manifest.read_bytes()).hexdigest())
        )
        check_refused("differs from the stored build", rollback, repository, "tiny", None)
        manifest = folder.rename(stored.folder) / "tiny/triptych.lock.json"
        assert files_of(repository, "tiny") == now
        found = {*tmp_path.rglob("*")} - {*around, tmp_path / "outside", stored.folder / "evil"}
        assert not found


def test_the_command_lists_and_puts_back(repository: Path) -> None:
    first = build_id(repository, "tiny")
    limit = "p99 <= 50 ms holds up to 7/s."
    (repository / "tiny/BENCH.md").write_text(
        f"# Speed of tiny\n\nBest: 9/s at 1 client.\n\n{limit}\n\n| load |\n| --- |\n"
    )
    verdicts = [
        {"metric": "mean_cosine", "value": 0.99984, "limit": 0.999},
        {"metric": "max_difference", "value": 2e-6, "limit": None},
        {"metric": "edge_error", "value": 0.0012, "limit": 0.02},
    ]
    gate = {**lock_data(repository, "tiny")["gate"], "verdicts": verdicts}
    second = write_next(repository, "tiny", 2, gate=gate)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "-r", str(repository)])
        return done.output if done.exception is None else str(done.exception)

    listed = json.loads(run("history", "tiny", "--json"))
    assert [build["build"] for build in listed["builds"]] == [second, first]
    figures = "passed, mean_cosine 0.9998 (limit 0.999), edge_error 0.0012 (limit 0.02)"
    assert [build["gate"] for build in listed["builds"]] == [figures, "passed"]
    assert [build["slo"] for build in listed["builds"]] == ["", limit]
    assert [bool(build["replaced_at"]) for build in listed["builds"]] == [False, True]
    shown = run("history", "tiny")
    assert f"{first[:12]}  built 2026-01-01T00:00:01 UTC, replaced " in shown
    assert f"fp32, passed\n  bench: 9/s at 1 client.\n  {limit}\n" in shown
    assert "1 replaced build in " in shown
    assert f"build {first[:12]} is active again" in run("rollback", "tiny")
    assert "is already active" in run("rollback", "tiny", first[:12])
    assert "0 replaced builds, 0.0 MB" in run("history", "tiny", "--keep", "0")
    assert "no build has been replaced" in run("rollback", "tiny")
    assert "Given: no build" in run("history", "nothing")


def test_a_kept_build_is_laid_out_as_a_repository(repository: Path, tmp_path: Path) -> None:
    first, old = build_id(repository, "tiny"), files_of(repository, "tiny")
    write_next(repository, "tiny", 2)
    write_next(repository, "guest", 2)
    kept = find_build(list_history(repository, "tiny"), first[:8])
    assert kept is not None
    kept.lay_out(tmp_path / "alone")
    assert files_of(tmp_path / "alone", "tiny") == old
    assert find_build(list_history(repository, "tiny"), first[:3]) is None
    (guest,) = list_history(repository, "guest")
    words = ["shares the core of another", "core of tiny"]
    check_refused(words, guest.lay_out, tmp_path / "guest")


def test_the_last_builds_are_kept_and_no_more(repository: Path) -> None:
    builds = [write_next(repository, "tiny", number) for number in range(2, HISTORY_LENGTH + 4)]
    kept = [one.build for one in list_history(repository, "tiny")]
    assert kept == builds[-2 : -HISTORY_LENGTH - 2 : -1]
    assert rollback(repository, "tiny", kept[-1]).builds == {"tiny": kept[-1]}
    assert len(list_history(repository, "tiny")) == HISTORY_LENGTH
    assert builds[-1] in [one.build for one in list_history(repository, "tiny")]
    assert sorted(path.name for path in history_folder(repository).iterdir()) == ["tiny"]


def test_the_order_of_builds_is_that_of_their_replacement_whatever_the_clock_says(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set back by a day before each build."""
    days = iter(range(28, 0, -1))

    class SetBack(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "SetBack":
            return cls(2026, 1, next(days), tzinfo=tz)

    monkeypatch.setattr(datetime, "datetime", SetBack)
    builds = [write_next(repository, "tiny", number) for number in range(2, HISTORY_LENGTH + 4)]
    kept = [one.build for one in list_history(repository, "tiny")]
    assert kept == builds[-2 : -HISTORY_LENGTH - 2 : -1]
    rollback(repository, "tiny", None)
    assert build_id(repository, "tiny") == builds[-2]


def test_pipelines_that_share_a_core_go_back_together(repository: Path) -> None:
    old = {name: files_of(repository, name) for name in ("tiny", "guest")}
    first = {name: build_id(repository, name) for name in old}
    write_next(repository, "tiny", 2, core_key="other")
    write_next(repository, "guest", 2, core_key="other")
    words = ["tiny has another core now", "Restore tiny with guest"]
    check_refused(words, rollback, repository, "guest", first["guest"])
    assert rollback(repository, "tiny", None).builds == first
    assert {name: files_of(repository, name) for name in old} == old
    # Nothing of the guest fits the other core any more.
    shutil.rmtree(history_folder(repository) / "guest")
    check_refused("no stored build of guest matches", rollback, repository, "tiny", None)
    assert {name: files_of(repository, name) for name in old} == old


def test_what_cannot_be_put_back_is_refused(repository: Path, tmp_path: Path) -> None:
    check_refused("no build has been replaced", rollback, repository, "tiny", None)
    first = build_id(repository, "tiny")
    write_next(repository, "tiny", 2)
    now = files_of(repository, "tiny")
    for wrong in ("0123456789", first[:3], "", "../tiny"):
        words = ["prefix of one stored build", first[:12]]
        check_refused(words, rollback, repository, "tiny", wrong)
    folder = history_folder(repository) / "tiny" / first
    for path, damage in (
        ("tiny/config.pbtxt", "other bytes"),
        ("tiny_core/1/model.onnx", "missing"),
        ("tiny/triptych.lock.json", "other bytes"),
    ):
        kept = folder / path
        content = kept.read_bytes()
        kept.unlink()  # a link: the repository keeps its own
        if damage == "other bytes":
            kept.write_bytes(content + b" ")
        words = [path, "differs from the stored build", damage]
        check_refused(words, rollback, repository, "tiny", None)
        assert files_of(repository, "tiny") == now
        kept.unlink(missing_ok=True)
        kept.write_bytes(content)
    # A copy elsewhere has its own history, and needs none to serve or to be built.
    copy = Path(shutil.copytree(repository, tmp_path / "elsewhere/repository"))
    assert list_history(copy, "tiny") == []
    rollback(repository, "tiny", None)
    assert files_of(copy, "tiny") == now


def test_builds_of_any_kind_are_kept_but_none_whose_engine_was_never_built(
    repository: Path,
) -> None:
    first, plan = build_id(repository, "tiny"), lock_data(repository, "tiny")["plan"]
    engine = {"precision": "fp32", "profiles": [], "graph_specs": [], "options": {}}
    write_next(repository, "tiny", 2, plan={**plan, "engine": engine})
    write_next(repository, "tiny", 3)
    assert [kept.build for kept in list_history(repository, "tiny")] == [first]
    other = write_next(repository, "guest", 2, schema="other-1", gate=None, plan={"max_length": 9})
    write_next(repository, "guest", 3)
    shown = CliRunner().invoke(app, ["history", "guest", "-r", str(repository)]).output
    assert f"{other[:12]}  built 2026-01-01T00:00:02 UTC, replaced " in shown
    assert "no precision, not checked\n" in shown
    assert rollback(repository, "guest", other).builds == {"guest": other}
    assert lock_data(repository, "guest")["schema"] == "other-1"
    other = write_next(repository, "tiny", 4, schema="other-1", plan={"max_length": 9})
    write_next(repository, "tiny", 5)
    words = ["another release of triptych and cannot be compared", "a later build"]
    check_refused(words, _candidate("tiny", repository, other[:8]).__enter__)
