"""docs/protocol.md is what the code says."""

from pathlib import Path

from gcmoe.protocol import CODECS, EDGES, GRAPH_EDGES, Cell
from gcmoe.protocol.document import EXAMPLE, main, render
from gcmoe.protocol.invariants import INVARIANTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_committed_document_is_current():
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "stale: run `make docs`"


def test_everything_is_named():
    text = render()
    names = [f"`{row.name}`" for row in (*EDGES, *GRAPH_EDGES, *INVARIANTS, *EXAMPLE.regions)]
    names += [f"`{cell.name.lower()}`" for cell in Cell] + [codec.__name__ for codec in CODECS]
    names += [f"`{edge.write.ptx}`" for edge in EDGES] + [f"`{edge.read.ptx}`" for edge in EDGES]
    assert [name for name in names if name not in text] == []


def test_tables_are_rectangular():
    columns = None
    for line in render().splitlines():
        if not line.startswith("|"):
            columns = None
            continue
        bars = line.replace("\\|", "").count("|")
        assert columns in (None, bars), line
        columns = bars


def test_invariants_have_unique_names_and_reasons():
    assert len({invariant.name for invariant in INVARIANTS}) == len(INVARIANTS)
    assert all(invariant.text and invariant.holds_because for invariant in INVARIANTS)


def test_check_tells_stale_from_current(tmp_path, capsys):
    path = tmp_path / "docs" / "protocol.md"
    assert main(["--check", str(path)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    path.write_text(path.read_text() + "\n")
    assert main(["--check", str(path)]) == 1
