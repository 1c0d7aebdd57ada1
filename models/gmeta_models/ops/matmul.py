"""Products of many rows with a matrix, in float32 on a CPU.

Shape suffixes: N rows, I inputs, O outputs"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gmeta_models.internals import onednn_linear

# torch's products go through MKL, which is slower than oneDNN on AMD's processors: these save 5 %
# of a MAML step, with 20 support rows a task 6 % (benchmarks/maml_step.py, an EPYC). But oneDNN
# generates code for every new number of rows, 0.8 ms each, and ragged tasks bring new ones with
# every step: so most rows go through oneDNN in a piece of one of few sizes, the rest through MKL.
LEAST_WORK = 4_000_000  # multiply-adds below which MKL is done before oneDNN has begun
DIGITS = 5  # leading binary digits of the piece's rows: 16 sizes from 1,024 rows to 2,047


def linear(rows_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return rows W^T + b: [N, O]. Not differentiable."""
    num_rows = rows_NI.shape[0]
    is_plain = rows_NI.dtype == torch.float32 and rows_NI.device.type == "cpu"
    if not is_plain or num_rows * weight_OI.numel() < LEAST_WORK:
        return F.linear(rows_NI, weight_OI, bias_O)
    first = num_rows - num_rows % (1 << max(num_rows.bit_length() - DIGITS, 0))
    piece_NO = onednn_linear(rows_NI[:first], weight_OI, bias_O)
    if first == num_rows:
        return piece_NO
    return torch.cat([piece_NO, F.linear(rows_NI[first:], weight_OI, bias_O)])
