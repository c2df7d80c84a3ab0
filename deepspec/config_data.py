"""Settings of prompts, servers and feature sources, parts of those in config_schema.py."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from deepspec.config_base import Count, FilePath, Gib, Settings, Texts, Weight


class DatasetConfig(Settings):
    """A set of prompts, and how its rows are to be read; local files may be copies of it.

    Attributes:
        name: word for the set.
        hub_id: owner/name on the hub, where it has several with `:configuration` or `:file.json`; None: files.
        hub_split: its split.
        revision: commit or branch, None for the newest.
        field: field that holds the conversation or the prompt, where it is called otherwise than docs/data.md says.
        id_field: field that holds the id, where it is not `id`.
        domain_field: field that says what kind of text a row is, where it is not `domain`.
        domains: domain for each value of that field; others are domains themselves.
        domain: of rows that name none.
        decontaminate: tasks or suites whose prompts must not be among those kept.
        citation: where it comes from.
    """

    name: str
    hub_id: str | None = None
    hub_split: str | None = None
    revision: str | None = None
    field: str | None = None
    id_field: str | None = None
    domain_field: str | None = None
    domains: dict[str, str] | None = None
    domain: str
    decontaminate: Texts
    citation: str

    @model_validator(mode="after")
    def _hub_set_has_a_split(self) -> Self:
        if self.hub_id is not None and self.hub_split is None:
            raise ValueError(f"hub_id {self.hub_id} is given, but no hub_split. Set dataset.hub_split=train.")
        return self


class SelectionConfig(Settings):
    """Which prompts are kept.

    Attributes:
        held_out: prompts set aside for evaluation.
        deduplicate: keep only the first of near-duplicates.
        similarity: Jaccard similarity (of word trigrams) from which two prompts are near-duplicates.
        domain_weights: share of each domain among the prompts kept, in any unit; None keeps them as they are.
        max_characters: longer conversations are left out.
        max_rows: rows read, None for all.
    """

    held_out: Annotated[int, Field(ge=0)]
    deduplicate: bool
    similarity: Annotated[float, Field(gt=0.0, le=1.0)]
    domain_weights: dict[str, Weight] | None = None
    max_characters: Count
    max_rows: Count | None = None

    @model_validator(mode="after")
    def _some_domain_weighs_something(self) -> Self:
        if self.domain_weights and not sum(self.domain_weights.values()):
            raise ValueError(f"domain_weights {self.domain_weights} are all zero; give one domain a weight above it.")
        return self


class FeaturesConfig(Settings):
    """Where target features come from.

    Attributes:
        source: `online` runs the target in the training process, `cached` reads what was written before.
        memory_gib: RAM for target passes of an online source, kept for later epochs; 0 keeps none.
        anchors_per_target_pass: a multiple of data.num_anchors; each run of the target then teaches several sets of
            anchors, num_anchors of a sequence at a time.
        overlap: run an online target over the next micro-batch while the draft learns from this one.
        cache: folder of a cache.
        encoding: how `deepspec data cache` writes features.
        format: our own, or DeepSpec's version 2 (bf16 only).
        shard_mib: size of one file of a cache.
        batch_size: sequences that the target runs over at once while a cache is written.
        prefetch_batches: micro-batches that are read from a cache ahead of their turn.
        limit: write at most so many samples.
    """

    source: Literal["online", "cached"]
    memory_gib: Gib
    anchors_per_target_pass: Count | None = None
    overlap: bool = False
    cache: FilePath
    encoding: Literal["bf16", "fp8", "int8"]
    format: Literal["deepspec", "deepspec_v2"]
    shard_mib: Count
    batch_size: Count
    prefetch_batches: Count
    limit: Count | None = None

    @property
    def overlaps(self) -> bool:
        """Whether the target runs ahead of the draft."""
        return self.source == "online" and self.overlap


class ServerConfig(Settings):
    """OpenAI-compatible servers that answer prompts.

    Attributes:
        urls: their addresses; requests are shared out among them.
        api: `chat` lets the server write the conversation by its own template, `completions` sends it our token ids.
        model: name that the servers know the target by; None for target.name_or_path.
        concurrency: requests in flight.
        timeout_seconds: longest wait for one answer.
        attempts: tries for each request.
        backoff_seconds: pause before the second try; later ones grow up to a minute, and a server may ask for more.
        api_key_variable: environment variable that holds the key, if one is needed.
        extensions: send what vLLM and SGLang know beyond OpenAI's own fields: token ids, thinking, top_k, min_p.
    """

    urls: Annotated[Texts, Field(min_length=1)]
    api: Literal["chat", "completions"]
    model: str | None = None
    concurrency: Count
    timeout_seconds: Annotated[float, Field(gt=0.0)]
    attempts: Count
    backoff_seconds: Annotated[float, Field(gt=0.0)]
    api_key_variable: Annotated[str, Field(min_length=1)]
    extensions: bool

    @field_validator("urls")
    @classmethod
    def _urls_are_http(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            try:
                parts = urlsplit(url)
                is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:  # brackets that do not close, a port beyond 65535
                is_address = False
            if not is_address:
                raise ValueError(f"{url!r} is no address; write it as http://localhost:8000/v1")
        return urls
