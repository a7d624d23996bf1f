"""What job=bench leaves: tables on stdout, and the same with every repeat in two files.

Knows figures and the options. Knows nothing about how they were measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddbatch.config import Config
from ddbatch.core import RunError
from ddbatch.jobs.benching.engines import Pair
from ddbatch.jobs.benching.figures import Figures, as_json, repeat_rows
from ddbatch.jobs.benching.files import write
from ddbatch.jobs.benching.headline import command_of, machine_of, versions
from ddbatch.jobs.benching.options import REPORT, TABLE
from ddbatch.jobs.benching.rates import Rates
from ddbatch.jobs.benching.report import ceilings, notes, tables
from ddbatch.jobs.show import facts, tell


@dataclass
class Report:
    """What holds for all arms, and their figures so far. prompts, watts: where they come from."""

    config: Config
    pair: Pair
    rates: Rates
    prompts: str
    watts: str
    found: list[Figures] = field(default_factory=list)

    @property
    def headline(self) -> dict[str, str]:
        """What every figure must name."""
        return {
            "machine": machine_of(self.pair.device),
            **versions(self.config.bench.peers),
            "model": self.pair.name,
            "dtype": str(self.pair.dtype).removeprefix("torch."),
            "command": command_of(self.config),
        }

    def save(self, *, is_whole: bool) -> None:
        """Both files, as far as the measurement is."""
        document = {
            "is_whole": is_whole,
            "headline": self.headline,
            "ceilings": {
                "read_bytes_per_second": self.rates.read,
                "copy_bytes_per_second": self.rates.copy,
                "matmul_flop_per_second": self.rates.matmul,
            },
            "prompts": self.prompts,
            "watts": self.watts,
            "notes": notes(self.found, self.prompts, self.watts),
            "arms": [as_json(item) for item in self.found],
        }
        rows = [row for item in self.found for row in repeat_rows(item)]
        try:
            write(self.config.output_dir, rows, document)
        except OSError as error:
            raise RunError(f"output_dir={self.config.output_dir}: {error}") from error

    def tell(self) -> None:
        """All of it on stdout."""
        head = self.headline
        known = versions(self.config.bench.peers)
        software = ", ".join(f"{name} {version}" for name, version in known.items())
        lines = [
            ("machine", head["machine"]),
            ("software", software),
            ("model", f"{head['model']}, {head['dtype']}"),
            ("command", head["command"]),
            ("measured", ceilings(self.rates)),
        ]
        place = self.config.output_dir
        ends = [("note", line) for line in notes(self.found, self.prompts, self.watts)]
        ends.append(("written to", f"{Path(place, TABLE)}, {Path(place, REPORT)}"))
        tell(f"{facts(lines)}\n\n{tables(self.found)}\n\n{facts(ends)}")
