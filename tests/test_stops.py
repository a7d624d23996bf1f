"""Stops of whole runs over a fake engine: where they come from, and what a row says of them."""

from __future__ import annotations

import json
from pathlib import Path

import fake
import pytest
from runs import Run, prompts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ddbatch.data.batching.stop_strings import StopStrings
from ddbatch.data.export.reasoning import reasoning_end
from ddbatch.jobs.generating.sampling_options import read_stop_file

Captured = pytest.CaptureFixture[str]
LONG = ("sampling.max_new_tokens=40", "sampling.ignore_eos=true")


def text_of(run: Run, token_ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(run.model / "tokenizer.json")).decode(token_ids))


def test_a_stop_string_ends_a_row_at_the_token_that_completes_it(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(40))
    stop = ["w1 ", "w22", "3 w4", " w57"]
    assert run(*LONG, "sampling.stop=['w1 ','w22','3 w4',' w57']") == 0
    done = run.table()
    stopped = [row for row in done if row["finish_reason"] == "stop"]
    assert {row["stop_reason"] for row in stopped} >= {"3 w4", " w57"}
    assert len(done) - len(stopped) > 2
    for row in done:
        ids, text = row["output_token_ids"], row["completion"]
        assert not any(string in text_of(run, ids[:-1]) for string in stop)
        if row["finish_reason"] == "stop":
            whole = text_of(run, ids)
            begins = {whole.find(string): string for string in stop[::-1] if string in whole}
            assert row["stop_reason"] == begins[min(begins)]
            assert text == whole[: min(begins)]
        else:
            assert (row["stop_reason"], row["output_tokens"], text) == (None, 40, text_of(run, ids))
            assert not any(string in text for string in stop)
        assert row["messages"][-1]["content"] == text


def test_a_stop_file_of_the_same_strings_goes_on_with_the_same_run(
    tmp_path: Path, capsys: Captured
) -> None:
    run = Run(tmp_path, prompts(29))
    file = tmp_path / "stops.txt"
    file.write_bytes(b"w7\r\n\r\n\\u0077\\u0032 \r\n")
    stop = "sampling.stop=[w7,'w2 ']"
    with pytest.raises(RuntimeError):
        run(*LONG, stop, engine=fake.FakeOptions(fail_at_step=8))
    begun = len(run.table())
    assert run(*LONG, f"sampling.stop_file={file}") == 0
    assert len(run.table()) == 29 > begun
    capsys.readouterr()
    assert run(*LONG, stop) == 0
    assert "nothing to do" in capsys.readouterr().out
    file.write_text("w7\nw3 \n")
    assert run(*LONG, f"sampling.stop_file={file}") == 2
    said = capsys.readouterr().err
    assert 'sampling.stop: ["w7", "w2 "] in the run, ["w7", "w3 "] now' in said
    assert "stop_file:" not in said
    manifest = json.loads((run.out / "manifest.json").read_text())
    assert str(tmp_path) not in json.dumps(manifest)
    other = Run(tmp_path / "other", prompts(29))
    assert other(*LONG, stop) == 0
    assert other.content() == run.content()


def test_a_row_may_have_stops_of_its_own_and_later_turns_see_the_cut_text(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w7 w8"}] * 2
    rows = [
        {"messages": chat, "how": {"stop": ["w3", "5"], "ignore_eos": True}},
        {"messages": chat, "how": {"stop": [], "ignore_eos": True}},
        {
            "messages": chat,
            "how": {"stop_token_ids": list(range(4, 50)), "stop": [], "ignore_eos": True},
        },
        {"messages": chat},
    ]
    run = Run(tmp_path, rows)
    options = ("data.turns=all", "sampling.stop=['w1']", "sampling.max_new_tokens=30")
    assert run("data.sampling_column=how", *options, "engine.max_len=80") == 0
    done = {(row["row_id"], row["turn"]): row for row in run.table()}
    assert done[0, 0]["stop_reason"] in ("w3", "5")
    assert done[1, 0]["stop_reason"] is None  # its own empty list takes the place of the run's
    assert done[2, 0]["output_token_ids"][-1] in range(4, 50)
    assert done[2, 0]["stop_reason"] == str(done[2, 0]["output_token_ids"][-1])
    assert done[3, 0]["stop_reason"] in ("w1", str(fake.EOS))
    for row_id in range(4):
        first, second = done[row_id, 0], done[row_id, 1]
        assert second["messages"][1]["content"] == first["completion"]


def test_a_row_that_does_not_go_with_the_run_is_rejected(tmp_path: Path) -> None:
    rows = [
        {"prompt": "w1", "how": {"temperature": 0}},
        {"prompt": "w1", "how": {"stop": ["w3", "</s>"]}},
        {"prompt": "w1", "how": {"stop": ["\ufffd"]}},
        {"prompt": "w1", "how": {"temperature": 1, "stop": ["</s> "]}},
    ]
    run = Run(tmp_path, rows)
    options = ("data.sampling_column=how", "sampling.n=3", "sampling.temperature=0.5")
    assert run(*options) == 0
    rejected = run.table("rejected")
    assert [(row["row_id"], row["sample"]) for row in rejected] == [
        (row_id, sample) for row_id in range(3) for sample in range(3)
    ]
    assert {row["code"] for row in rejected} == {"bad_sampling"}
    reasons = [row["reason"] for row in rejected[::3]]
    assert reasons[0] == (
        "temperature=0 in a row of a run with sampling.n=3: all samples would be equal"
    )
    assert "stop: '</s>' is a special token" in reasons[1]
    assert "sampling.stop_token_ids=[1] or a row's own stop_token_ids" in reasons[1]
    assert "without U+FFFD" in reasons[2]
    assert len(run.table()) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["sampling.stop=['']"], 'sampling.stop=[""]: expected a list, each item text, not empty'),
        (["sampling.stop=['a\ufffd']"], "each item text, not empty, without lone surrogates"),
        (["sampling.stop=['</s>']"], "sampling.stop=[</s>]: '</s>' is a special token"),
        (["sampling.stop=[a]", "sampling.stop_file=FILE"], "set one, not both"),
        (["sampling.stop_file=/nowhere"], "sampling.stop_file=/nowhere: no such file"),
        (["sampling.stop_file=FILE"], "line 2: \\x is no escape; allowed: \\n \\t \\r"),
    ],
)
def test_stops_that_can_stop_nothing_are_refused_before_the_weights(
    tmp_path: Path, capsys: Captured, options: list[str], said: str
) -> None:
    run = Run(tmp_path, prompts(2))
    (tmp_path / "stops").write_text("\\n\n\\x41\n")
    (run.model / "model.safetensors").unlink()
    assert run(*(option.replace("FILE", str(tmp_path / "stops")) for option in options)) == 2
    assert said in capsys.readouterr().err
    assert not run.out.exists()


def test_a_special_token_that_stays_in_the_text_may_be_a_stop_string(tmp_path: Path) -> None:
    run = Run(tmp_path, prompts(5))
    assert run("sampling.stop=['</s>']", "output.skip_special_tokens=false") == 0


def test_a_backslash_in_a_stop_string_gets_one_note(tmp_path: Path, capsys: Captured) -> None:
    run = Run(tmp_path, prompts(2))
    assert run("sampling.stop=['\\n\\n',w3]") == 0
    said = capsys.readouterr().err
    assert said.count("note: sampling.stop=[\\n\\n,w3]: a backslash is taken as it is") == 1
    assert "sampling.stop_file" in said
    for number, stop in enumerate(("[w3]", "['\\x']", "['\n']")):
        assert run(f"sampling.stop={stop}", f"output_dir={tmp_path / str(number)}") == 0
        assert "backslash" not in capsys.readouterr().err


def test_a_stop_file_says_what_it_means(tmp_path: Path) -> None:
    file = tmp_path / "stops"
    for content, stop in (
        (b"a", ("a",)),
        (b"a\n", ("a",)),
        (b"\xef\xbb\xbfa\r\nb\r\n\r\n", ("a", "b")),
        (b"  a \n\n \n", ("  a ", " ")),
        (b"\\n\\n\n\\t\\r\\\\n\n", ("\n\n", "\t\r\\n")),
        (b"\\u00e4\\uD83D\\ude00x\n", ("\u00e4\U0001f600x",)),
        ("\u4f60\u2028\n".encode(), ("\u4f60\u2028",)),
        (b"#a\n", ("#a",)),
    ):
        file.write_bytes(content)
        assert read_stop_file(file) == stop
    for content, said in (
        (b"", "holds no stop string"),
        (b"\n\r\n", "holds no stop string"),
        (b"a\n\\q\n", "line 2: \\q is no escape"),
        (b"a\\", "line 1: \\ is no escape"),
        (b"\\u12", "line 1: \\u is no escape"),
        (b"\\ud800", "line 1: expected text, not empty, without lone surrogates"),
        (b"\n\\ufffd", "line 2: expected text"),
        (b"\xff", "allowed: a UTF-8 text file"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"^sampling\.stop_file=") as refused:
            read_stop_file(file)
        assert said in str(refused.value)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("skips", ["true", "false"])
def test_the_end_of_the_reasoning_is_counted_in_tokens(
    tmp_path: Path, is_special: bool, skips: str
) -> None:
    run = Run(tmp_path, prompts(30))
    file = run.model / "tokenizer.json"
    file.write_text(file.read_text().replace('"w50"', '"</think>"'))
    tokenizer = Tokenizer.from_file(str(file))
    close_id = tokenizer.token_to_id("</think>")
    if is_special:
        tokenizer.add_special_tokens([AddedToken("</think>")])
        tokenizer.save(str(file))
    assert run(*LONG, f"output.skip_special_tokens={skips}", "sampling.stop=[w77]") == 0
    done = run.table()
    is_hidden = is_special and skips == "true"
    for row in done:
        ids = row["output_token_ids"]
        expected = ids.index(close_id) + 1 if close_id in ids else None
        assert row["reasoning_end"] == expected
        assert ("</think>" in row["completion"]) == (expected is not None and not is_hidden)
    assert {row["reasoning_end"] is None for row in done} == {False, True}


def test_a_tag_of_several_tokens_is_closed_by_the_last(tmp_path: Path) -> None:
    words = ["<", "</", "think", ">", ">!", "x", "</think>"]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="x")
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</think>")])
    finder = StopStrings(tokenizer, skip_special_tokens=True)
    for ids, expected in (
        ([5, 1, 2, 3, 5, 1, 2, 3], 4),
        ([5, 1, 2, 4, 5], 4),
        ([1, 2, 5, 3], None),
        ([5, 6, 1, 2, 3], 2),
        ([1, 2, 3, 6], 3),
        ([1, 6, 2, 3], 2),
        ([], None),
    ):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert reasoning_end(text, ids, finder) == expected, ids


def test_a_character_that_the_cap_cuts_is_whole_in_no_text_and_kept_in_the_ids(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, [{"token_ids": [5 + n]} for n in range(20)])
    symbols = ["<s>", "</s>", "a", "b", "c", *sorted(pre_tokenizers.ByteLevel.alphabet())[-92:]]
    tokenizer = Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(symbols)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(run.model / "tokenizer.json"))
    assert run("sampling.ignore_eos=true") == 0
    assert run("job=check") == 0
    done = run.table()
    assert len(done) == 20
    for row in done:
        assert row["finish_reason"] == "length"
        assert "\ufffd" in row["completion"]
        assert row["completion"] == tokenizer.decode(row["output_token_ids"])
