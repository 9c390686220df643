"""The table of ports in docs/security.md has a row of every module that opens one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import metrics_docs


def test_the_table_is_what_the_code_declares() -> None:
    assert metrics_docs.SECURITY.read_text() == metrics_docs.security_page()
    opening = metrics_docs.opening_calls()
    assert {"sluice.runtime.server", "services.rollout.openai.server"} <= opening.keys()


@pytest.mark.parametrize(
    "line", ["asyncio.start_server(answer)", "server.add_secure_port('a:0', credentials)"]
)
def test_a_port_without_a_row_is_noticed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sluice").mkdir()
    (tmp_path / "sluice/durable.py").write_text(line)  # the module as it is declares none
    monkeypatch.setattr(metrics_docs, "ROOT", tmp_path)
    with pytest.raises(AttributeError, match="OPEN_PORTS"):
        metrics_docs.ports_table()
