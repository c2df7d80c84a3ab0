"""What all groups of settings share: their base class and the kinds of value they are made of."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# YAML and JSON know lists only, so a strict tuple would refuse every file.
Integers = Annotated[tuple[int, ...], Field(strict=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
FilePath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=0.0)]
# More than any machine has, and little enough that its bytes are a number that Python can make whole.
Gib = Annotated[float, Field(ge=0.0, le=2.0**20)]


class Settings(BaseModel):
    """Base of all groups: immutable, no unknown key, no silent conversion of types, no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
