"""The fuzz of `make fuzz`, with a few messages per RPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import fuzz


def test_no_message_does_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every RPC of every service, and the OpenAI port, under TLS and a token."""
    arguments = ("--messages", "4", "--security", "tls")
    status = fuzz.main([*arguments, "--directory", str(tmp_path)])
    output = capsys.readouterr().out
    assert status == 0, output
    line = output.splitlines()[-1]
    assert line.startswith("fuzz: rpcs=")
    assert "internal=0 unknown=0 died=0 hung=0 rss_growth_mib=" in line
