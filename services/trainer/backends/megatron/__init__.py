"""Training on Megatron-Core under every parallel layout; see docs/megatron.md.

Nothing is imported here: `config` and `layout` must stay free of torch, and on a CPU `cpu` has
to be installed before the first import of Megatron.
"""
