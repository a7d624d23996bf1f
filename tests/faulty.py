"""ddbatch with a plan that dies: `python tests/faulty.py KEY=VALUE ...` runs the command, but every
captured round of a draft tree reads beyond a tensor on the device.
"""

from __future__ import annotations

import sys

import torch

from ddbatch.__main__ import main
from ddbatch.engine import programs
from ddbatch.engine.state import RoundShape


def plant() -> None:
    """Have captured rounds fail as a broken kernel does: the device's context is lost."""
    sound = programs.CapturedPrograms.round

    def round_with_a_fault(self: programs.CapturedPrograms, shape: RoundShape) -> None:
        sound(self, shape)
        beyond = torch.tensor([1 << 20], device="cuda")
        torch.zeros(4, device="cuda")[beyond].sum()

    programs.CapturedPrograms.round = round_with_a_fault  # type: ignore[method-assign]


if __name__ == "__main__":
    plant()
    sys.exit(main(sys.argv[1:]))
