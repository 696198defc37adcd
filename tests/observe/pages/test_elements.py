"""Elements escape whatever they hold."""

from __future__ import annotations

from html.parser import HTMLParser

from mmldlm.observe.pages.elements import Column, definitions, element, section, table, to_html

HOSTILE = "<script>alert(1)</script> & \" ' </td>"


class Reader(HTMLParser):
    """Tags, attributes and texts of some HTML."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.values, self.texts = [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [value for _, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)


def test_texts_and_attributes_come_back_as_they_were():
    read = Reader(to_html([element("p", HOSTILE, element("b", HOSTILE), HOSTILE, class_=HOSTILE)]))
    assert read.tags == ["p", "b"]
    assert read.texts == [HOSTILE] * 3 and read.values == [HOSTILE]


def test_tables_hold_their_cells_in_order():
    columns = [Column("name", False), Column("value"), Column("text", False)]
    read = Reader(
        to_html([section("A", table("caption", columns, [("a", "1", HOSTILE), ("b", "2", "y")]))])
    )
    assert read.tags.count("tr") == 3 and read.tags.count("td") == 4 and "script" not in read.tags
    assert [text for text in read.texts if text.strip()] == [
        "A", "caption", "name", "value", "text", "a", "1", HOSTILE, "b", "2", "y",
    ]  # fmt: skip


def test_definitions_pair_names_and_values():
    assert Reader(to_html([definitions([("a", HOSTILE), ("b", "2")])])).texts == [
        "a",
        HOSTILE,
        "b",
        "2",
    ]
