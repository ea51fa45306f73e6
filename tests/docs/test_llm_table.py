"""The table of files on the page about language models."""

import pytest

from tests.support import genai_builder, llm_table


@pytest.mark.filterwarnings("ignore:where='all-linear' adapts no packed experts")
def test_the_table_of_files_is_up_to_date():
    """The losses in it are those that the tests of the files compare with."""
    start, end = llm_table.MARKERS
    shown = llm_table.PAGE.read_text().partition(start)[2].partition(end)[0].strip()
    assert shown == llm_table.table(), "run: python -m tests.support.llm_table"


def test_every_stored_file_of_the_builder_is_in_the_table():
    assert llm_table.BUILDER.keys() == genai_builder.STORED.keys()
