"""manifest.json and the card: written once, read back exactly, and open about nothing private."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import load_dataset
from made_run import ATTEMPT, make_run
from test_schema import STORE, finished, with_logprobs

from ddbatch.core import RunError
from ddbatch.data.batching.columns import Columns, KeptColumn
from ddbatch.data.folder import RunFolder
from ddbatch.data.manifest import Manifest, card, create_manifest, read_manifest
from ddbatch.data.schema import (
    acceptance_schema,
    completions_schema,
    logprobs_schema,
    rejected_schema,
)
from ddbatch.data.sink import Sink

KEEP = (
    KeptColumn("score", pa.float64(), False),
    KeptColumn("when", pa.timestamp("us", tz="UTC"), False),
    KeptColumn("meta", pa.string(), True),
)
MANIFEST = Manifest(
    identity={"sampling.seed": 0, "data.template": None, "stop token ids": [1, 2]},
    columns=Columns("chat", "messages", id_column="name", keep=KEEP),
    schemas={
        "completions": completions_schema(keep=KEEP, store=STORE),
        "acceptance": acceptance_schema(),
        "rejected": rejected_schema(),
    },
    template_date="2026-11-29T20:00:00",
    card={},
    config={"sampling": {"n": 1}},
    ddbatch="0.1.0",
)


def test_a_manifest_is_read_back_as_it_was_made(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert create_manifest(folder, "a" * 12, MANIFEST) == MANIFEST
    read = read_manifest(folder)
    assert read == MANIFEST
    for table, schema in MANIFEST.schemas.items():
        assert read.schemas[table].equals(schema, check_metadata=True)


def test_the_second_of_two_starts_goes_on_with_the_manifest_of_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    create_manifest(folder, "a" * 12, MANIFEST)
    other = replace(MANIFEST, identity={"sampling.seed": 7}, card={"license": "mit"})
    assert create_manifest(folder, "b" * 12, other) == MANIFEST
    assert folder.readme.read_text() == card(MANIFEST)


def test_a_card_that_was_edited_by_hand_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    create_manifest(folder, "a" * 12, MANIFEST)
    folder.readme.write_text("mine")
    create_manifest(folder, "b" * 12, MANIFEST)
    assert folder.readme.read_text() == "mine"


def test_the_card_has_a_config_for_each_table_and_what_the_user_adds() -> None:
    text = card(replace(MANIFEST, card={"license": "apache-2.0", "tags": ["a", "b: c"]}))
    front = text.split("---\n")[1]
    assert front == (
        "configs:\n"
        "- config_name: default\n  data_files: completions/*.parquet\n"
        "- config_name: acceptance\n  data_files: acceptance/*.parquet\n"
        "- config_name: rejected\n  data_files: rejected/*.parquet\n"
        '"license": "apache-2.0"\n"tags": ["a", "b: c"]\n'
    )
    tables = {"completions": MANIFEST.schemas["completions"]}
    assert "acceptance" not in card(replace(MANIFEST, schemas=tables))
    assert "logprobs" not in text
    told = card(replace(MANIFEST, schemas=MANIFEST.schemas | {"logprobs": logprobs_schema(5)}))
    assert "- config_name: logprobs\n  data_files: logprobs/*.parquet\n" in told
    assert "- `logprobs`: the same rows: the most probable tokens" in told


def test_the_manifest_says_how_many_top_tokens_there_are_and_whether_log_probs_are(
    tmp_path: Path,
) -> None:
    made = replace(
        MANIFEST,
        schemas=MANIFEST.schemas | {"logprobs": logprobs_schema(5)},
        identity={"sampling.logprobs": True},
    )
    read = create_manifest(RunFolder(tmp_path), "a" * 12, made)
    assert read.schemas["logprobs"].equals(logprobs_schema(5), check_metadata=True)
    assert (read.has_logprobs, MANIFEST.has_logprobs) == (True, False)


def test_log_probs_load_with_datasets_from_the_first_part_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rows=3, samples=1, skipped=(2,), top_logprobs=3)

    def loaded() -> list[dict[str, object]]:
        place, cache = str(folder.place), str(tmp_path / "cache")
        done = load_dataset(place, cache_dir=cache)["train"]
        best = load_dataset(place, "logprobs", cache_dir=cache)["train"]
        assert best["row_id"][:] == done["row_id"][:]
        for row, scores in zip(best, done["output_logprobs"], strict=True):
            shapes = {len(row["top_token_ids"]), len(row["top_logprobs"]), len(scores)}
            assert len(shapes) == 1
            assert {len(top) for top in row["top_logprobs"]} == {3}
        return list(best)

    assert [row["row_id"] for row in loaded()] == [0, 1]
    sink = Sink(folder, ATTEMPT, read_manifest(folder).schemas, part_rows=9, part_seconds=9)
    sink.open_shard(0, 1)
    sink.add(0, [with_logprobs(finished(2), 3)])
    assert sink.commit_part(0) is not None
    assert [row["row_id"] for row in loaded()] == [0, 1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"identity"', '"identities"'),
        lambda text: text.replace('"arrow": "', '"arrow": "AAAA'),
    ],
)
def test_a_manifest_that_cannot_be_trusted_stops_the_run(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    folder = RunFolder(tmp_path)
    create_manifest(folder, "a" * 12, MANIFEST)
    folder.manifest.write_text(damage(folder.manifest.read_text()))
    with pytest.raises(RunError, match=r"manifest\.json cannot be read"):
        read_manifest(folder)


def test_the_schemas_can_be_read_by_people(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    create_manifest(folder, "a" * 12, MANIFEST)
    fields = json.loads(folder.manifest.read_text())["schemas"]["completions"]["fields"]
    assert fields["row_id"] == "int64"
    assert fields["when"] == "timestamp[us, tz=UTC]"
