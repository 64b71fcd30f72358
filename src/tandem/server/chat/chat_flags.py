"""`check_chat_flags`: flags about chats that no model could meet."""

from __future__ import annotations

from tandem.flags.engine_config import EngineConfig
from tandem.server.chat.formats.reasoning_format import reasoning_format
from tandem.server.chat.formats.tool_format import tool_format
from tandem.text.chat_template import ChatTemplate, chat_template_text


def check_chat_flags(config: EngineConfig) -> None:
    """Before a model is loaded for minutes. Raises ConfigError, CheckpointError."""
    if config.tool_call_parser is not None:
        tool_format(config.tool_call_parser)
    if config.reasoning_parser is not None:
        reasoning_format(config.reasoning_parser)
    if config.chat_template is not None:
        ChatTemplate(chat_template_text(config.chat_template))
