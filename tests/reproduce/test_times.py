"""times.csv: one line for each scale of each reproduction, whoever measured it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedhet.core.errors import ConfigError
from fedhet.reproduce.command import main
from fedhet.reproduce.times import Time, note, read

FIRST, SECOND = Time("own/table2", "cpu", 6, 18, 90), Time("own/table1", "cpu", 1, 0, 7)


def test_a_later_time_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    assert read(path) == []
    for time in (FIRST, SECOND, FIRST._replace(scale="smoke"), FIRST._replace(seconds=80)):
        note(path, time)
    assert read(path) == [SECOND, FIRST._replace(seconds=80), FIRST._replace(scale="smoke")]
    assert path.read_text().startswith("reproduction,scale,runs,trials,seconds\nown/table1,cpu,1,0")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,seconds\nown/table1,7\n", "its columns are name,seconds"),
        (f"{','.join(Time._fields)}\nown/table1,cpu,1,0,soon\n", "'soon'"),
        (f"{','.join(Time._fields)}\nown/table1,cpu\n", "not enough values"),
    ],
)
def test_a_file_of_something_else_is_kept(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    for attempt in (
        lambda: note(path, FIRST),
        lambda: main(["fedgmm/figure6", "scale=smoke", "--estimate", "--times", str(path)]),
    ):
        with pytest.raises(
            ConfigError, match=rf"times\.csv: .*{says}.*; expected is reproduction,"
        ):
            attempt()
    assert path.read_text() == text
