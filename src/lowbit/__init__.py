"""lowbit multiplies matrices of few bits, from Python, at the speed of the hardware.

lowbit.matmul(a, b)         exact product of int8 or uint8 matrices, int32 out
lowbit.linear_weight_only   float activations by 4-bit weights with a scale for each group
lowbit.pack(b)              an operand packed once, for many products
lowbit.VectorIndex(dim)     vectors of 8 or 4 bits each, to be searched for the nearest
lowbit.quantize(x, "int8")  floats to integers with scales, a QTensor
lowbit.torch.quantize_      a PyTorch model, in place (needs the extra "torch")
"""

from lowbit.gemm import gemm
from lowbit.kernels.cpu.shared.epilogue import Clamp
from lowbit.numerics import QTensor, quantize
from lowbit.ops import linear_dynamic, matmul, matmul_scaled, pack
from lowbit.search.index import VectorIndex
from lowbit.weight_only import linear_weight_only
from lowbit.weights.packed_file import load_packed, save_packed
from lowbit.weights.panels import PackedMatrix

__version__ = "0.1.0"

__all__ = [
    "Clamp",
    "PackedMatrix",
    "QTensor",
    "VectorIndex",
    "__version__",
    "gemm",
    "linear_dynamic",
    "linear_weight_only",
    "load_packed",
    "matmul",
    "matmul_scaled",
    "pack",
    "quantize",
    "save_packed",
]
