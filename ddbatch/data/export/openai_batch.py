"""Lines as a batch of the OpenAI API answers: a response for a completion, an error for a reject.

Knows that file format. Knows nothing about how lines are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from ddbatch.data.export.reasoning import split_reasoning

SOURCES = ("id", "completion", "prompt_tokens", "output_tokens", "finish_reason")

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def batch_schema(*, has_reasoning: bool) -> pa.Schema:
    """The types of a line; has_reasoning: a message has reasoning_content beside its content."""
    fields = ("role", "content", *(("reasoning_content",) if has_reasoning else ()))
    message = pa.struct([(name, pa.string()) for name in fields])
    choice = pa.struct(
        [("index", pa.int64()), ("message", message), ("finish_reason", pa.string())]
    )
    body = pa.struct(
        [
            ("id", pa.string()),
            ("object", pa.string()),
            ("created", pa.int64()),
            ("model", pa.string()),
            ("choices", pa.list_(choice)),
            ("usage", pa.struct([(name, pa.int64()) for name in _USAGE])),
        ]
    )
    response = pa.struct([("status_code", pa.int64()), ("request_id", pa.string()), ("body", body)])
    error = pa.struct([("code", pa.string()), ("message", pa.string())])
    return pa.schema(
        [("id", pa.string()), ("custom_id", pa.string()), ("response", response), ("error", error)]
    )


def batch_lines(table: pa.Table, *, model: str, reasoning: str) -> pa.Table:
    """One line a row; a row with a code is a rejected one.

    custom_id is the row's id, or its row_id where it has none; a later turn or sample of the row
    adds -TURN-SAMPLE, so that lines share one only where rows share an id. created is 0: a run
    keeps no time of a row, and equal runs make equal lines.
    """
    lines = [_line(row, model, reasoning) for row in table.to_pylist()]
    return pa.Table.from_pylist(lines, schema=batch_schema(has_reasoning=reasoning == "split"))


def _line(row: Mapping[str, object], model: str, reasoning: str) -> dict[str, object]:
    key = f"{row['row_id']}-{row['turn']}-{row['sample']}"
    is_first = (row["turn"], row["sample"]) == (0, 0)
    name = row["row_id"] if row["id"] is None else row["id"]
    head: dict[str, object] = {
        "id": f"batch_req_{key}",
        "custom_id": str(name) if is_first else f"{name}-{row['turn']}-{row['sample']}",
    }
    if row["code"] is not None:
        error = {"code": row["code"], "message": row["reason"]}
        return {**head, "response": None, "error": error}
    body = {
        "id": f"chatcmpl-{key}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": _message(row["completion"], reasoning),
                "finish_reason": row["finish_reason"],
            }
        ],
        "usage": _usage(row["prompt_tokens"], row["output_tokens"]),
    }
    response = {"status_code": 200, "request_id": f"req_{key}", "body": body}
    return {**head, "response": response, "error": None}


def _message(completion: object, reasoning: str) -> dict[str, object]:
    assert isinstance(completion, str), completion
    answer = split_reasoning(completion)
    message: dict[str, object] = {"role": "assistant"}
    message["content"] = completion if reasoning == "keep" else answer.text
    if reasoning == "split":
        message["reasoning_content"] = answer.reasoning
    return message


def _usage(prompt_tokens: object, output_tokens: object) -> dict[str, int]:
    assert isinstance(prompt_tokens, int), prompt_tokens
    assert isinstance(output_tokens, int), output_tokens
    counts = (prompt_tokens, output_tokens, prompt_tokens + output_tokens)
    return dict(zip(_USAGE, counts, strict=True))
