"""job=probe: how many tokens a round of this model may have on this GPU, before something breaks.

Each candidate runs in a process of its own (probing/child.py); what is found is kept for the plans
of later runs (probing/answers.py). Reads config.json of model.path, no weights: random ones in its
sizes break alike, and are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from ddbatch.checks import check_built
from ddbatch.config import Config
from ddbatch.core import ExitCode, RunError
from ddbatch.engine.limits import ProbeAnswer
from ddbatch.jobs.generating.decoding import asked, choose_device
from ddbatch.jobs.probing.answers import Facts, facts_of, keep_answer, read_answer
from ddbatch.jobs.probing.candidate import COMMAND, Tried, try_candidate
from ddbatch.jobs.probing.child import Task
from ddbatch.jobs.probing.search import Search
from ddbatch.jobs.reading import check_model_folder
from ddbatch.jobs.show import aligned, duration, facts, plural, say, tell
from ddbatch.models.families import read_target_dims
from ddbatch.models.load import choose_dtype


def run(config: Config, command: Sequence[str] = COMMAND) -> int:
    """Find the limit, print what was tried and keep the answer; returns the exit code. command:
    what runs a candidate."""
    check_built(config)
    check_model_folder("model.path", config.model.path)
    task, about = _open(config)
    tried = _search(config, task, command)
    tell(_table(tried))
    answer = _answer(tried, about.device)
    lines = [("limit", _told(answer, tried)), ("of", _of(about))]
    earlier = read_answer(about)
    if earlier is not None and earlier.stands_beside(answer):
        lines.append(
            ("stays", f"what was found on {earlier.date}, which tried more: {_said(earlier)}")
        )
    else:
        lines.append(("kept in", str(keep_answer(about, answer))))
    tell("\n" + facts(lines))
    return ExitCode.DONE


def _open(config: Config) -> tuple[Task, Facts]:
    """What candidates have in common (of no tokens yet), and what the answer depends on."""
    engine, device = config.engine, choose_device(config.engine.device)
    is_gpu = device.type == "cuda"
    for name, is_on in (("capture", engine.capture is True), ("reproducible", engine.reproducible)):
        if is_on and not is_gpu:
            raise ValueError(
                f"engine.{name}=true needs a CUDA device, and candidates run on the CPU; allowed: "
                "false"
            )
    dims = read_target_dims(Path(config.model.path))
    dtype = choose_dtype(config.model.dtype, dims, device)
    task = Task(
        model=config.model.path,
        device=str(device),
        dtype=dtype,
        tokens=0,
        budget=asked(engine.budget),
        in_order=engine.reproducible and is_gpu,
        is_captured=engine.capture in ("auto", True) and is_gpu,
    )
    return task, facts_of(dims, dtype, device, in_order=task.in_order)


def _search(config: Config, task: Task, command: Sequence[str]) -> list[Tried]:
    """Try candidates until the limit lies between two of them; RunError where the first fails."""
    search, found = Search(config.probe.step, config.probe.widest), list[Tried]()
    while (tokens := search.next()) is not None:
        one = try_candidate(replace(task, tokens=tokens), config.probe.timeout, command)
        say(f"probe: {tokens:,} tokens: {one.outcome} ({duration(one.seconds)}): {one.detail}")
        found.append(one)
        search.tell(tokens, is_sound=one.outcome == "ok")
    if not search.works:
        raise RunError(
            f"job=probe: a round of {plural(found[0].tokens, 'token')} fails already: "
            f"{found[0].outcome}, {found[0].detail}; that is no limit that could be kept to, or "
            f"probe.timeout={config.probe.timeout} is too short"
        )
    return found


def _answer(tried: Sequence[Tried], device: str) -> ProbeAnswer:
    """The most tokens that worked are a limit where more of them failed; short memory is none."""
    works = max(one.tokens for one in tried if one.outcome == "ok")
    is_limit = _first_failure(tried) not in (None, "no memory")
    return ProbeAnswer(works if is_limit else None, works, device, date.today().isoformat())


def _first_failure(tried: Sequence[Tried]) -> str | None:
    """What became of the fewest tokens that failed."""
    failed = [one for one in tried if one.outcome != "ok"]
    return min(failed, key=lambda one: one.tokens).outcome if failed else None


def _table(tried: Sequence[Tried]) -> str:
    head = ("tokens", "verdict", "seconds", "rows x nodes: what was seen")
    lines = [(f"{one.tokens:,}", one.outcome, f"{one.seconds:.1f}", one.detail) for one in tried]
    return aligned([head, *lines], right=(0, 2))


def _told(answer: ProbeAnswer, tried: Sequence[Tried]) -> str:
    if answer.tokens is not None:
        fails = min(one.tokens for one in tried if one.outcome != "ok")
        return (
            f"{answer.tokens:,} tokens a round, rows x (budget + 1); {fails:,} fail. "
            "engine.gemm_limit=auto keeps to it from now on"
        )
    short = "; more do not fit into memory" if _first_failure(tried) else ""
    return f"{_said(answer)}{short}"


def _said(answer: ProbeAnswer) -> str:
    if answer.tokens is not None:
        return f"a limit of {answer.tokens:,} tokens"
    return f"no limit found up to {answer.tried:,} tokens"


def _of(about: Facts) -> str:
    order = ", engine.reproducible=true" if about.in_order else ""
    triton = "" if about.triton is None else f", triton {about.triton}"
    return f"{about.device}, {about.dtype}, torch {about.torch}{triton}{order}"
