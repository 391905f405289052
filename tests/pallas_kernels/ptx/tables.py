"""All instructions that are known: opcode prefix → (entry, whether it decides where a group goes on)."""

from ptx import access, arithmetic, copies, flow, matrix, tensor

TABLE = {**arithmetic.TABLE, **access.TABLE, **copies.TABLE, **flow.TABLE, **matrix.TABLE, **tensor.TABLE}
