"""Declared tables: rows by column, scalar columns, truncated texts, and repeated steps."""

import numpy as np

from hpcdist.hdf5 import files
from hpcdist.hdf5.datasets import Column, MetricsTable, read_spread, texts

COLUMNS = (
    Column("step", "i8", "1", "steps"),
    Column("session", "i8", "1", "start"),
    Column("word", "S5", "1", "said"),
    Column("share", "f8", "1", "of each rank", wide=True),
)


def test_rows_are_stored_by_column_and_repeated_steps_replaced(tmp_path):
    table = MetricsTable("group/rows", COLUMNS, second="rank", remade=True)
    with files.edit(tmp_path / "a.h5", "test", 1) as file:
        assert table.read(file) == {}
        table.append(file, step=[], session=0, word=[], share=np.zeros((0, 2)))
        assert table.name not in file, "an append without rows must not create the table"
        table.append(file, step=[1, 2, 3], session=0, word=["a", "bü", "abcdü"], share=np.ones((3, 2)))
        table.append(file, step=2, session=1, word="new", share=[[1, 2, 3]])
        rows = table.read(file)
        assert rows["step"].tolist() == [1, 2] and rows["session"].tolist() == [0, 1]
        assert texts(rows["word"]) == ["a", "new"] and rows["share"][1].tolist() == [1, 2, 3]
        assert file["group/rows/share"].attrs["long_name"] == "of each rank"
        assert file["group/rows/rank"][...].tolist() == [0, 1, 2]


def test_texts_are_truncated_at_whole_characters(tmp_path):
    table = MetricsTable("rows", COLUMNS[:3])
    with files.edit(tmp_path / "a.h5", "test", 1) as file:
        table.append(file, step=[5, 6], session=0, word=["abcdü", "abcü"])
        table.append(file, step=[5], session=1, word=["x"])
        assert table.read(file)["step"].tolist() == [5, 6, 5]
        assert texts(table.read(file)["word"]) == ["abcd", "abcü", "x"]
        table.drop_from(file, 6)
        assert table.read(file)["step"].tolist() == [5]
        assert read_spread(file, "rows", ("step", "session"), 10)[1] and read_spread(file, "none", ("step",), 1) == (
            {},
            True,
        )
