"""A process that waits for another says so, and for whom."""

from __future__ import annotations

import pytest

from configs.load import UserError
from extract import waiting


def test_waiting_for_a_process_is_said_and_ends(monkeypatch, capsys):
    looks = iter([None, None, None, "shard"])
    monkeypatch.setattr(waiting, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)
    assert waiting.made_by(1, 2, "shard-000003", lambda: next(looks)) == "shard"
    said = "waiting:  process 1 of 2 is to make shard-000003; if it is gone, start it again"
    assert capsys.readouterr().out.splitlines() == [said] * 3
    monkeypatch.setattr(waiting, "PATIENCE_HOURS", -1.0)
    with pytest.raises(UserError, match="process 1 of 2 did not make shard-000003"):
        waiting.made_by(1, 2, "shard-000003", lambda: None)


def test_what_is_there_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "PATIENCE_HOURS", -1.0)
    assert waiting.made_by(0, 1, "a shard", lambda: 0) == 0  # falsy, and there
    assert not capsys.readouterr().out
