"""The configuration: names and defaults of the contract, and what `load` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddbatch.checks import (
    BUILT_JOBS,
    JOBS,
    NOT_BUILT,
    RULES,
    check_built,
    option,
    shown,
)
from ddbatch.config import Config, load, option_types

# The public contract, written out a second time: a changed name or default has to be meant.
CONTRACT = """
job=generate output_dir=???
model.path=??? model.revision=null model.dtype=auto model.hash=fast
drafter.path=null drafter.block=null
data.path=??? data.name=null data.revision=null data.split=train data.prompt_column=null
data.messages_column=null data.token_ids_column=null data.id_column=null data.tools_column=null
data.sampling_column=null data.keep_columns=[] data.system_prompt=null data.system_prompt_file=null
data.template=auto data.chat_template_kwargs=null data.template_date=null data.turns=last
data.limit=null data.grow=append data.on_long=reject data.select=all
sampling.temperature=0.0 sampling.top_p=1.0 sampling.top_k=0 sampling.min_p=0.0
sampling.max_new_tokens=1024 sampling.n=1 sampling.seed=0 sampling.stop=[] sampling.stop_file=null
sampling.stop_token_ids=[] sampling.ignore_eos=false sampling.logprobs=false sampling.top_logprobs=0
engine.device=auto engine.method=auto engine.budget=auto engine.topk=auto engine.spine=off
engine.rows=auto engine.max_len=auto engine.page=auto engine.gemm_limit=auto engine.capture=auto
engine.gate=true engine.on_gate_failure=fallback engine.audit_rate=0.005 engine.reproducible=false
output.part_seconds=300 output.part_rows=4096 output.max_error_rate=0.01 output.resume=auto
output.grace_seconds=25 output.skip_special_tokens=true output.store=[prompt_ids,acceptance]
output.card=null shards.rows=20000 shards.start=auto shards.wait=false
merge.output_dir=null merge.runs=[] merge.format=full merge.by=key merge.filter=null merge.dedup=[]
merge.reasoning=keep merge.file_type=parquet merge.file_mb=300
estimate.rows=null estimate.tokens_per_second=null estimate.output_tokens=null status.json=false
bench.rows=[1,8,32] bench.context=[1024] bench.arms=[autoregressive,chain,ddtree:16]
bench.repeats=5 bench.new_tokens=128 bench.prompts=null bench.acceptance=null bench.peers=[]
probe.widest=4096 probe.step=64 probe.timeout=120
"""


def loaded(**options: object) -> Config:
    """`load` of the three required options plus `group__name=value`."""
    given = {"model__path": "m", "data__path": "d", "output_dir": "o"} | options
    composed: dict[str, object] = {}
    for key, value in given.items():
        group, _, name = key.rpartition("__")
        part = composed.setdefault(group, {}) if group else composed
        assert isinstance(part, dict)
        part[name] = value
    return load(composed)


def refusal(**options: object) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the tests look at the message
        loaded(**options)
    return str(caught.value)


def test_names_and_defaults_are_the_contract() -> None:
    assert [f"{key}={shown(option(Config(), key))}" for key in option_types()] == CONTRACT.split()


def test_every_rule_names_an_option_and_allows_its_default() -> None:
    for key, rule in RULES.items():
        default = option(Config(), key)
        for item in default if isinstance(default, list) else [default]:
            assert item is None or rule.allows(item), key


def test_the_required_options_are_enough() -> None:
    config = loaded()
    assert (config.model.path, config.data.path, config.output_dir) == ("m", "d", "o")
    assert config.output.store == ["prompt_ids", "acceptance"]


def test_all_missing_required_options_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"not set: model\.path, data\.path, output_dir$"):
        load({"drafter": {"path": "r"}})
    with pytest.raises(ValueError, match=r"not set: data\.path, output_dir$"):
        load({"model": {"path": "m"}})


def test_an_empty_required_path_is_missing() -> None:
    assert refusal(model__path="") == "required and not set: model.path"


def test_an_empty_optional_path_is_refused() -> None:
    assert "drafter.path is empty" in refusal(drafter__path="")


@pytest.mark.parametrize("job", JOBS)
def test_only_built_jobs_are_accepted(job: str) -> None:
    if job in BUILT_JOBS:
        assert loaded(job=job, merge__output_dir="/m").job == job
    else:
        assert refusal(job=job) == f"job={job} is not built yet; built: {', '.join(BUILT_JOBS)}"


def test_an_unknown_job_gets_did_you_mean() -> None:
    assert "(did you mean generate?)" in refusal(job="generat")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engine__budget", "atuo", "auto or an integer in [0, 1024] (did you mean auto?)"),
        ("engine__budget", -1, "auto or an integer in [0, 1024]"),
        ("engine__rows", 0, "auto or an integer >= 1"),
        ("engine__rows", "8 ", "auto or an integer >= 1"),
        ("engine__gemm_limit", "none", "null, auto or an integer >= 1"),
        ("engine__method", "dtree", "(did you mean ddtree?)"),
        ("engine__device", "gpu", "auto, cpu, cuda, cuda:N"),
        ("engine__capture", "yes", "auto, true or false"),
        ("model__dtype", "bf16", "auto, float32, bfloat16 or float16"),
        ("data__on_long", "cut", "reject or truncate_left"),
        ("data__limit", 0, "an integer >= 1"),
        ("data__template", "atuo", "auto, none or a file (did you mean auto?)"),
        ("data__system_prompt_file", "nowhere.txt", "no such file"),
        ("sampling__max_new_tokens", 0, "an integer >= 1"),
        ("sampling__temperature", -0.1, "0 or a number >= 1e-06"),
        ("sampling__temperature", 1e-38, "0 or a number >= 1e-06"),
        ("sampling__top_k", 2**31, "an integer in [0, 2147483647]"),
        ("sampling__n", 2**15, "an integer in [1, 32767]"),
        ("sampling__temperature", float("nan"), "0 or a number >= 1e-06"),
        ("sampling__top_p", 0.0, "a number in (0, 1]"),
        ("sampling__top_p", 1.1, "a number in (0, 1]"),
        ("sampling__seed", 2**63, "an integer in [0, 9223372036854775807]"),
        ("sampling__stop_token_ids", [3, -1], "an integer >= 0"),
        ("sampling__top_logprobs", -1, "an integer in [0, 1024]"),
        ("sampling__top_logprobs", 1025, "an integer in [0, 1024]"),
        ("output__store", ["promt_ids"], "(did you mean prompt_ids?)"),
        ("output__part_rows", 0, "an integer >= 1"),
        ("drafter__block", 1, "an integer >= 2"),
        ("data__chat_template_kwargs", 3, "a dict"),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: object, expected: str) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"{key.replace('__', '.')}={shown(value)}")
    assert expected in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine__budget", 0),
        ("engine__gemm_limit", None),
        ("engine__gemm_limit", 1152),
        ("engine__capture", False),
        ("engine__capture", True),
        ("engine__gate", False),
        ("engine__on_gate_failure", "stop"),
        ("engine__audit_rate", 0.1),
        ("engine__device", "cuda:1"),
        ("engine__page", 64),
        ("sampling__seed", 2**63 - 1),
        ("sampling__ignore_eos", True),
        ("sampling__stop_token_ids", [0, 7]),
        ("output__store", []),
        ("output__skip_special_tokens", False),
        ("data__template", "none"),
        ("data__on_long", "truncate_left"),
        ("data__keep_columns", ["a", "b"]),
        ("data__chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_what_is_built_is_accepted(key: str, value: object) -> None:
    assert option(loaded(**{key: value}), key.replace("__", ".")) == value


LATER = [f"{group}.{name}" for group, names in NOT_BUILT.items() for name in names.split()]
OTHER_VALUE: dict[str, object] = {
    "sampling.temperature": 0.7,
    "sampling.top_p": 0.9,
    "sampling.min_p": 0.1,
    "sampling.stop": ["x"],
    "engine.spine": "on",
    "shards.wait": True,
}


@pytest.mark.parametrize("key", LATER)
def test_options_of_later_releases_are_refused_away_from_their_default(key: str) -> None:
    value = OTHER_VALUE.get(key, 7 if isinstance(option(Config(), key), int) else "7")
    more = {"sampling__temperature": 0.7} if key == "sampling.n" else {}
    config = loaded(**{key.replace(".", "__"): value}, **more)
    with pytest.raises(ValueError, match="is not built yet") as refused:
        check_built(config)
    assert f"{key}={shown(value)} is not built yet" in str(refused.value)


def test_an_empty_stop_string_is_shown() -> None:
    assert refusal(sampling__stop=["a", ""]).startswith('sampling.stop=[a,""]: expected a list')


def test_temperature_zero_with_several_samples_is_refused() -> None:
    assert refusal(sampling__n=2) == (
        "sampling.n=2 with sampling.temperature=0: all samples would be equal; "
        "allowed: sampling.n=1, or a temperature above 0"
    )


def test_top_log_probs_need_log_probs() -> None:
    assert refusal(sampling__top_logprobs=5) == (
        "sampling.top_logprobs=5 with sampling.logprobs=false: allowed: sampling.logprobs=true, or "
        "sampling.top_logprobs=0"
    )
    for top in (0, 5, 1024):
        config = loaded(sampling__top_logprobs=top, sampling__logprobs=True)
        check_built(config)
        assert config.sampling.top_logprobs == top


@pytest.mark.parametrize("method", ["ddtree", "chain"])
def test_a_method_that_drafts_needs_a_drafter(method: str) -> None:
    assert "needs drafter.path" in refusal(engine__method=method)
    assert loaded(engine__method=method, drafter__path="x").engine.method == method


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"engine__budget": 4}, ["engine.budget=4", "needs drafter.path"]),
        ({"drafter__block": 4}, ["drafter.block=4", "needs drafter.path"]),
        (
            {"drafter__path": "x", "engine__budget": 0, "engine__method": "chain"},
            ["engine.budget=0", "engine.method=chain"],
        ),
        (
            {"drafter__path": "x", "engine__budget": 5, "engine__method": "autoregressive"},
            ["engine.budget=5", "engine.method=autoregressive"],
        ),
    ],
)
def test_method_budget_and_drafter_that_contradict_each_other_are_refused(
    options: dict[str, object], parts: list[str]
) -> None:
    said = refusal(**options)
    assert all(part in said for part in parts), said


def test_two_system_prompts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    assert loaded(data__system_prompt_file=str(file)).data.system_prompt_file == str(file)
    assert "set one" in refusal(data__system_prompt_file=str(file), data__system_prompt="hi")


def test_two_prompt_columns_are_refused() -> None:
    message = refusal(data__prompt_column="a", data__messages_column="b")
    assert message.startswith("data.prompt_column=a, data.messages_column=b: ")


def test_home_is_expanded_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").touch()
    config = loaded(
        model__path="~/m",
        drafter__path="~/r",
        data__path="~/d/*.parquet",
        data__template="~/t.jinja",
        data__system_prompt_file="~/t.jinja",
        output_dir="~/o",
        merge__output_dir="~/c",
        merge__runs=["~/o2", "/o3"],
    )
    assert config.merge.output_dir == f"{tmp_path}/c"
    assert config.merge.runs == [f"{tmp_path}/o2", "/o3"]
    assert config.model.path == f"{tmp_path}/m"
    assert config.drafter.path == f"{tmp_path}/r"
    assert config.data.path == f"{tmp_path}/d/*.parquet"
    assert config.data.template == config.data.system_prompt_file == f"{tmp_path}/t.jinja"
    assert config.output_dir == f"{tmp_path}/o"


def test_an_unknown_name_is_refused() -> None:
    assert refusal(foo=1) == "foo: no such option"
    assert "Key 'bugdet' not in 'EngineConfig'" in refusal(engine__bugdet=1)


def test_an_empty_system_prompt_is_no_system_prompt() -> None:
    assert "data.system_prompt is empty" in refusal(data__system_prompt="")
