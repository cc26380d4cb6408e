"""Wheels that the package index does not have are an error in pip's words."""

from pathlib import Path

from triptych.base.wheels import download_wheels


def test_a_package_that_is_not_there_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    said = download_wheels(["no-such-package==1.0"], tmp_path / "wheels", "--no-index")
    assert said == "ERROR: No matching distribution found for no-such-package==1.0"
    assert not list(tmp_path.rglob("*.whl"))


def test_pip_has_a_time_limit(tmp_path: Path) -> None:
    said = download_wheels(["no-such-package==1.0"], tmp_path, "--no-index", timeout_s=0.0)
    assert said == "no answer within 0 s"
