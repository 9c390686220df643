"""Declarative weight rules, HF <-> Megatron, one file a family; see docs/megatron.md."""
