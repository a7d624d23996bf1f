"""A candidate's process whose products break beyond a number of tokens: `python
tests/faulty_probe.py FAULT TOKENS TASK` does what `python -m ddbatch.jobs.probing.child TASK` does.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import Tensor

from ddbatch.jobs.probing import child
from ddbatch.models import decoder
from ddbatch_kernels.normed import Normed


def plant(fault: str, tokens: int) -> None:
    """Have the product of gate and up break for more than so many tokens."""
    sound = decoder.gated_linear

    def faulty(normed: Normed, weight: Tensor, *, in_order: bool = False) -> Tensor:
        act_TF = sound(normed, weight, in_order=in_order)
        if len(act_TF) > tokens:
            if fault == "abort":
                os.kill(os.getpid(), signal.SIGABRT)
            elif fault == "cuda":
                raise RuntimeError("CUDA error: an illegal memory access was encountered\n(hints)")
            elif fault == "beyond":  # as a broken kernel does: the device's context is lost
                beyond = torch.tensor([1 << 20], device=act_TF.device)
                torch.zeros(4, device=act_TF.device)[beyond].sum().item()
            elif fault == "memory":
                raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
            elif fault == "hang":
                time.sleep(600)
            elif fault == "wrong":
                act_TF[tokens] += 1.0  # a single one of the tokens
            elif fault == "nan":
                act_TF[tokens] = torch.nan
        return act_TF

    decoder.gated_linear = faulty


if __name__ == "__main__":
    torch.set_num_threads(1)
    plant(sys.argv[1], int(sys.argv[2]))
    sys.exit(child.main(sys.argv[3]))
