"""Settings: what can be set, what is allowed, and where each value came from.

`settings.py` has every setting and its default, `validate.py` checks values, `sources.py` reads files with
line numbers, and `config.py` merges all sources. `ladder.py` turns settings into policies; `prompts/` has
the templates.
"""

from refold.config.config import AgentSettings, Compact, Config, Source, load_config

__all__ = ["AgentSettings", "Compact", "Config", "Source", "load_config"]
