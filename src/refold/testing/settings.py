"""When the results of tools expire: for stores that keep settings."""

from typing import Any

import pytest

from refold.core.event import Expiry
from refold.session.api import open
from refold.stores.store import Settings, ToolSetting
from refold.testing.words import KEY, ODD, Reopen, entries

FULL = Expiry(0, "compact", "ai-summary", 0, "What\x00 \ud800\nmatters?", "relevance", 0.25)


class SettingsContract:
    @pytest.fixture
    def settings(self, store: Any) -> Any:
        return store if isinstance(store, Settings) else pytest.skip("this store keeps no settings")

    # proves: A13
    def test_a_setting_is_what_was_set_last_for_its_agent_and_tool(self, settings: Any) -> None:
        assert list(settings.settings()) == []
        settings.set_setting(ToolSetting("a", "grep", Expiry(after_steps=1, length=9)))
        settings.set_setting(ToolSetting("", "grep", FULL))
        settings.set_setting(ToolSetting("a", "grep", Expiry(after_steps=2)))
        assert sorted(settings.settings(), key=lambda one: one.agent) == [
            ToolSetting("", "grep", FULL),
            ToolSetting("a", "grep", Expiry(after_steps=2)),
        ]

    def test_a_setting_in_which_nothing_is_set_is_gone(self, settings: Any) -> None:
        for agent in ("", "a"):
            settings.set_setting(ToolSetting(agent, "grep", Expiry(mode="remove")))
        settings.set_setting(ToolSetting("a", "grep", Expiry()))
        settings.set_setting(ToolSetting("b", "grep", Expiry()))
        assert list(settings.settings()) == [ToolSetting("", "grep", Expiry(mode="remove"))]

    def test_settings_have_any_name_and_outlive_conversations(self, settings: Any) -> None:
        made = {ToolSetting(name, name, Expiry(after_steps=n)) for n, name in enumerate(filter(None, ODD))}
        settings.append(KEY, entries(0, 1))
        for one in made:
            settings.set_setting(one)
        settings.erase(KEY)
        assert set(settings.settings()) == made

    # proves: A13
    def test_settings_are_in_force_in_conversations_opened_after(self, settings: Any) -> None:
        file = {"tools": {"grep": {"expire": {"after_steps": 9, "length": 100}}}}
        before = open("a", store=settings, config=file)
        settings.set_setting(ToolSetting("", "grep", Expiry(after_steps=0)))
        after = open("a", store=settings, config=file)
        assert before.settings.tools["grep"].expire == Expiry(after_steps=9, length=100)
        assert after.settings.tools["grep"].expire == Expiry(after_steps=0, length=100)

    def test_settings_are_there_when_the_store_is_opened_again(
        self, settings: Any, reopen: Reopen | None
    ) -> None:
        if reopen is None:
            pytest.skip("what is in this store goes with the process")
        settings.set_setting(ToolSetting("a", "grep", FULL))
        other: Any = reopen()
        assert list(other.settings()) == [ToolSetting("a", "grep", FULL)]
        other.close()
