"""Peak memory of a whole run over a fake engine, by number of input rows: a benchmark, not a test.

    python tests/measure_memory.py [ROWS ...]

Each size runs in a process of its own, on rows of one to seven words, into a folder that is thrown
away. Prints rows, seconds, rows/s, and the peak resident memory of the process in MB after its
first part and at its end, and the ratio to the first size.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import resource, sys
import fake, runs
from pathlib import Path
from ddbatch.data.sink import Sink
peaks = []
real = Sink.commit_part
def note(self, shard):
    done = real(self, shard)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return done
Sink.commit_part = note
run = runs.Run(Path(sys.argv[1]))
code = run("shards.rows=20000", "output.part_rows=4096", engine=fake.FakeOptions(rows=64))
assert code == 0, code
print(peaks[0], peaks[-1])
"""


def measure(num_rows: int) -> tuple[float, float, float]:
    """Seconds, and peak MB after the first part and at the end."""
    with tempfile.TemporaryDirectory() as place:
        with (Path(place) / "p.jsonl").open("w") as file:
            for n in range(num_rows):
                words = " ".join(f"w{(n * 7 + k) % 90}" for k in range(1 + n % 7))
                file.write(json.dumps({"prompt": words}) + "\n")
        started = time.monotonic()
        command = [sys.executable, "-c", CHILD, place]
        here = Path(__file__).resolve().parent
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        first, last = map(float, done.stdout.splitlines()[-1].split())
        return time.monotonic() - started, first, last


def main() -> None:
    """Measure each size and print a line of a table."""
    sizes = [int(text) for text in sys.argv[1:]] or [2_000, 20_000, 200_000]
    print("    rows   seconds   rows/s   MB, first part   MB, end   ratio")
    base = 0.0
    for size in sizes:
        seconds, first, last = measure(size)
        base = base or last
        rate = size / seconds
        print(f"{size:8,}{seconds:10.1f}{rate:9,.0f}{first:17.0f}{last:10.0f}{last / base:8.2f}")


if __name__ == "__main__":
    main()
