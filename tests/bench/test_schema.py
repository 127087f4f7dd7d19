"""What is a record and what is not."""

import json

import pytest
from sample import make_record

from bench import schema


def spoilt(**changes):
    record = make_record()
    record["rows"][0] |= changes
    return record


def test_a_record_survives_a_file(tmp_path):
    record = make_record()
    path = tmp_path / "sub" / "record.json"
    schema.write(record, path)
    assert schema.read(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_a_failed_row_has_an_error_and_no_time():
    failed = dict.fromkeys(schema.TIMES) | {"correct": False, "error": "no kernel image"}
    assert schema.problems_of(spoilt(**failed)) == []
    silent = {key: value for key, value in failed.items() if key != "error"}
    assert "no error is given" in schema.problems_of(spoilt(**silent))[0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"median_us": "fast"}, "median_us = 'fast'"),
        ({"floor_us": float("nan")}, "floor_us = nan"),
        ({"correct": 1}, "correct = 1"),
        ({"tokens_per_rank": True}, "tokens_per_rank = True"),
        ({"p10_us": 1e9}, "out of order"),
        ({"sustained_us": None}, "sustained_us = None"),
    ],
)
def test_what_does_not_fit_is_named(changes, complaint):
    found = schema.problems_of(spoilt(**changes))
    assert len(found) == 1
    assert complaint in found[0]
    assert found[0].startswith("row 0")


@pytest.mark.parametrize("name", [n for n, field in schema.ROW.items() if field.required])
def test_required_fields_are_required(name):
    record = make_record()
    del record["rows"][1][name]
    assert f"row 1: {name} is missing" in schema.problems_of(record)[0]


def test_other_versions_and_other_things_are_refused(tmp_path):
    assert "reads 2" in schema.problems_of(make_record(schema_version=1))[0]
    assert "an object is required" in schema.problems_of([])[0]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match=r"x\.json: not a record"):
        schema.read(path)
    with pytest.raises(ValueError, match="gpu is missing"):
        schema.write({k: v for k, v in make_record().items() if k != "gpu"}, path)
