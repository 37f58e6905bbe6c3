"""The fields of a config.json, read with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration or a name cannot be used; the message is one line that says why."""


class Fields:
    """A configuration whose fields go by several names, as Hugging Face's do."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of these fields that is there, a whole number; else the default.

        Raises:
            ConfigError: it is no whole number of at least `least`, or it is missing and has no default.
        """
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ConfigError(f"{self.name}: {name}: expected a whole number from {least} up, got {value!r}")
                return value
        if default is None:
            raise ConfigError(f"{self.name}: the field {' or '.join(names)} is missing")
        return default

    def optional(self, name: str) -> int | None:
        """Return a whole number, or None where it is missing or null."""
        return None if self.config.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value, or the default where it is missing or null."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.name}: {name}: expected true or false, got {value!r}")
        return value

    def listed(self, name: str) -> list[Any] | None:
        """Return a list, or None where it is missing or null."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{self.name}: {name}: expected a list, got {value!r}")
        return value
