"""One command that checks the whole system on a bare machine with an accelerator.

`python -m tools.accelerator_check`; docs/accelerators.md says how. What starts the steps
(`__main__`, `runner`, `packages`, `report`) needs Python alone; a step needs what it imports.
"""
