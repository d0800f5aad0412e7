"""bringup: bare GPU nodes to tuned, supervised LLM servers."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: catalog/, inventories/, playbooks/ and roles/ lie here."""
