"""All instructions that are known: opcode prefix → (entry, whether it decides where a group goes on)."""

from ptx import access, arithmetic, copies, flow, matrix, scheduling, tensor

PARTS = (arithmetic, access, copies, flow, matrix, scheduling, tensor)
TABLE = {name: entry for part in PARTS for name, entry in part.TABLE.items()}
