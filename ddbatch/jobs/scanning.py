"""Look at the input of data.path without a run: for jobs that read prompts and record nothing.

Knows the options of the input. Knows nothing about what its rows are read for.
"""

from __future__ import annotations

from typing import cast

from ddbatch.config import Config
from ddbatch.data.source.files import list_inputs
from ddbatch.data.source.formats import Select
from ddbatch.data.source.inputs import Inputs, scan


def scan_input(config: Config) -> Inputs:
    """Look at the input's files as far as it takes to count their rows."""
    data = config.data
    listing = list_inputs(
        data.path,
        name=data.name,
        revision=data.revision,
        split=data.split,
        select=cast(Select, data.select),
    )
    return scan(
        listing,
        limit=data.limit,
        samples=config.sampling.n,
        shard_rows=config.shards.rows,
        is_hashed=False,
    )
