"""Names and codes of NCCL: data types, reduction operators, results."""

from __future__ import annotations

from typing import Final, Literal

__all__ = [
    "BOOLEAN_REDUCTIONS",
    "COMPLEX_REDUCTIONS",
    "DTYPES",
    "DTYPE_BYTES",
    "REDUCTIONS",
    "RESULTS",
    "Reduction",
]

#: NCCL's data types: name to ``ncclDataType_t``.
DTYPES: Final[dict[str, int]] = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}

#: Bytes of one element, by ``ncclDataType_t``.
DTYPE_BYTES: Final[tuple[int, ...]] = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)

#: NCCL's built-in reduction operators: name to ``ncclRedOp_t``.
REDUCTIONS: Final[dict[str, int]] = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

#: What reduces booleans, as the operator on their bytes.
BOOLEAN_REDUCTIONS: Final[dict[str, str]] = {
    "any": "max",
    "all": "min",
    "max": "max",
    "min": "min",
}

#: What reduces complex numbers, by their parts.
COMPLEX_REDUCTIONS: Final[tuple[str, ...]] = ("sum", "avg")

Reduction = Literal["sum", "prod", "max", "min", "avg", "any", "all"]

#: The names of ``ncclResult_t``, by code.
RESULTS: Final[tuple[str, ...]] = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)
