"""What METADATA, WHEEL and RECORD say, and what is wrong with them."""

from __future__ import annotations

import pytest
from ddtree import distinfo


def test_headers_end_at_the_first_empty_line_and_may_go_on_over_several() -> None:
    found = distinfo.headers("Name: demo\nRequires-Dist: a\n  >=1\nrequires-dist: b\nbroken\n\nName: other\n")
    assert found == {"name": ["demo"], "requires-dist": ["a >=1", "b"]}


def test_a_path_with_commas_and_quotes_is_read_as_it_was_written() -> None:
    (row,) = distinfo.record('"a,b ""c"".py",sha256=x,3\n')
    assert row == distinfo.Row('a,b "c".py', "sha256=x", 3)


@pytest.mark.parametrize(
    "line", ["a,b", "a,b,c,d", ",sha256=x,1", "a,md5=x,1", "a,sha256=x,-1", "a,sha256=x,9e9", "a\0b,sha256=x,1"]
)
def test_what_is_no_record_is_told(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        distinfo.record(f"ok,,\n{line}\n")


def test_what_an_installer_adds_does_not_change_what_a_wheel_brought() -> None:
    wheel = "a.py,sha256=x,1\nd-1.dist-info/RECORD,,\n"
    installed = wheel + "../../../bin/a,sha256=y,2\nd-1.dist-info/INSTALLER,sha256=z,3\na.pyc,,\n"
    digests = [distinfo.distribution("d-1.dist-info", "", "", text)[0]["content_sha256"] for text in (wheel, installed)]
    assert digests[0] == digests[1] != distinfo.content_digest("d-1.dist-info", distinfo.record("a.py,sha256=w,1"))


def test_the_folder_names_what_metadata_does_not() -> None:
    facts, _ = distinfo.distribution("Demo_Pkg-1.2.dist-info", "", "", None)
    assert (facts["name"], facts["version"], bool(facts["problem"])) == ("demo-pkg", "1.2", True)


def test_the_build_of_torch_is_read_from_its_text() -> None:
    text = "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    assert distinfo.torch_build(text) == {"version": "2.11.0+cu130", "cuda": "13.0", "git": ""}
    assert distinfo.torch_build("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: str = '6'")["cuda"] == ""
