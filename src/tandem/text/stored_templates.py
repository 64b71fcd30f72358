"""The chat templates beside a checkpoint: one, or several with names, of which two are used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.spec.small_files import TEMPLATE_BYTES, read_text
from tandem.text.chat_template import ChatTemplate

log = logging.getLogger("tandem.text")

ChatTemplates = dict[str, str]  # by name

DEFAULT, WITH_TOOLS = "default", "tool_use"  # as in Transformers
NO_TEMPLATE = "this model has no chat template: give it one (--chat-template FILE), or use completions"


def stored_templates(directory: Path, listed: Any) -> ChatTemplates:
    """chat_template.jinja with those of additional_chat_templates/, or else what tokenizer_config.json
    or chat_template.json lists."""
    files = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files[DEFAULT] = directory / "chat_template.jinja"
    if files:
        return {name: read_text(file, TEMPLATE_BYTES) for name, file in files.items()}
    return named_templates(listed)


def named_templates(listed: Any) -> ChatTemplates:
    """listed: a text, {name: text}, or [{"name": …, "template": …}]."""
    if isinstance(listed, str):
        return {DEFAULT: listed}
    if isinstance(listed, list):
        pairs = [(each.get("name"), each.get("template")) for each in listed if isinstance(each, dict)]
    else:
        pairs = list(listed.items()) if isinstance(listed, dict) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str) and text}


def chosen_template(source: ChatTemplates | str | None, variables: Mapping[str, Any]) -> ChatTemplate | None:
    """None: there is none that every request could have. Raises CheckpointError."""
    templates = named_templates(source)
    if DEFAULT not in templates:
        if templates:
            log.warning("none of the chat templates (%s) is named %r", ", ".join(templates), DEFAULT)
        return None
    return ChatTemplate(templates[DEFAULT], variables, templates.get(WITH_TOOLS))
