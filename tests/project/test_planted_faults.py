"""The faults that `tests/planted_faults.py` plants: their number, their places, their text."""

from collections import Counter

from code_faults import MIN_FAULTS, PACKAGE, chosen_faults, compiles


def test_there_are_faults_in_every_package() -> None:
    faults = chosen_faults()
    assert len(faults) >= 100
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    counts = Counter(fault.package for fault in faults)
    assert set(counts) == packages
    assert min(counts.values()) >= MIN_FAULTS
    assert max(Counter(fault.kind for fault in faults).values()) <= len(faults) / 5


def test_a_fault_changes_its_line_and_stays_python() -> None:
    for fault in chosen_faults()[::7]:
        text = (PACKAGE / fault.path).read_text(encoding="utf-8")
        assert text.splitlines()[fault.line - 1].strip() == fault.before, fault
        assert fault.before != fault.after
        assert fault.planted() != text.encode()
        assert compiles(fault)
