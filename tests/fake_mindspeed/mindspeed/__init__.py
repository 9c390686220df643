"""MindSpeed's face where the NPU is the fake one: see `megatron_adaptor`."""
