"""The base model of a run as a card names it: its hub id, and the licence that its own card states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.settings import Config
from exgrpo_cli.publishing.cards import Base
from exgrpo_cli.questions.hub import parse_hub_id, read_card

LICENCE_KEYS = ("license", "license_name", "license_link")


def find_base(config: Config) -> Base:
    """The base model of a run's settings. Raises InputError where a hub model's card cannot be had."""
    source = config.backbone.source
    folder = Path(source)
    if folder.is_dir():
        card = folder / "README.md"
        values: Mapping[str, Any] = read_card(card) if card.is_file() else {}
        return Base(name=folder.name, hub_id=str(values.get("base_model") or ""), licence=licence_of(values))
    hub = parse_hub_id(source)
    if hub is None or source == "tiny":
        return Base(name=config.backbone.name, hub_id="", licence={})
    return Base(name=hub.repo, hub_id=hub.repo, licence=licence_of(_hub_card(hub.repo, config.backbone.revision)))


def licence_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """What a card says about the licence."""
    return {key: card[key] for key in LICENCE_KEYS if card.get(key)}


def _hub_card(repo: str, revision: str) -> Mapping[str, Any]:
    from huggingface_hub import errors, hf_hub_download

    try:
        return read_card(Path(hf_hub_download(repo, "README.md", revision=revision)))
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise InputError(
                f"the card of the base model {repo} cannot be fetched, and its licence must be kept: try again with a "
                "network, or fetch the model first."
            ) from error
        return {}
    except (errors.HTTPError, errors.HfHubHTTPError, OSError) as error:
        raise InputError(
            f"the card of the base model {repo} cannot be fetched ({str(error).splitlines()[0]}), and its licence must "
            "be kept: try again later."
        ) from error
