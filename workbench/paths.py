"""Where our own files lie on this machine."""
from __future__ import annotations

from pathlib import Path

import platformdirs

APP = "lora-bench"


def settings_file() -> Path:
    return platformdirs.user_config_path(APP) / "settings.toml"


def chats_folder() -> Path:
    return platformdirs.user_data_path(APP) / "chats"


def log_file() -> Path:
    return platformdirs.user_log_path(APP) / "engine.log"


def votes_file() -> Path:
    return platformdirs.user_data_path(APP) / "votes.jsonl"
