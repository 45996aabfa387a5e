"""One short question to the Hugging Face hub. Its own libraries try an unreachable hub again for a minute."""

# huggingface_hub ships partial types.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Literal

from penstock.errors import UserError

TRY_S = 10.0


def check_on_hub(name: str, kind: Literal["model", "dataset"], file: str = "config.json") -> None:
    """Refuse a name that neither this machine's cache nor the hub has.

    Args:
        name: such as Qwen/Qwen3-0.6B.
        kind: of the repository.
        file: that the cache holds if it was downloaded.

    Raises:
        UserError: why it cannot be had, and what to do.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # of httpx or of httpx2, as the hub's version has it
        OfflineModeIsEnabled,
    )

    try:
        if isinstance(try_to_load_from_cache(name, file, repo_type=kind), str):
            return
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=TRY_S)
    except EntryNotFoundError:  # the repository is there
        return
    except (HfHubHTTPError, HFValidationError):
        why = "has none of that name, or does not let you read it: check the name, or set HF_TOKEN"
    except OfflineModeIsEnabled:
        why = "is not asked, as HF_HUB_OFFLINE is set: unset it, or give the path of a folder"
    except (HTTPError, OSError):
        why = "cannot be reached: give the path of a folder, or download it first where there is a network"
    else:
        return
    raise UserError(f"no {kind} {name!r}: there is no such folder, and the Hugging Face hub {why}")
