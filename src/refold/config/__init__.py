"""Configuration: every setting, its default and range, and the file and line that a value came from.

`settings.py` and `serving.py` define the settings, `validate.py` checks values, `sources.py` reads files with
line numbers, `legacy.py` reads older names, and `config.py` merges all sources. `ladder.py` turns settings
into policies; `prompts/` has the templates for summarizers.
"""

from refold.config.config import AgentSettings, Compact, Config, Source, load_config

__all__ = ["AgentSettings", "Compact", "Config", "Source", "load_config"]
